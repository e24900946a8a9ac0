"""The page of a run, which `rpcmp drive --ui` serves live and `rpcmp report` writes as a file.

    events ──> state (what the page shows, of bounded size) ──> assets/*.js, in a browser

The server sends the changes of the state; a report holds all of it. `assets/main.js` puts the page
together; `assets/pipeline_diagram.js`, `stage_graph.js` and `curves.js` draw its pictures.
"""
