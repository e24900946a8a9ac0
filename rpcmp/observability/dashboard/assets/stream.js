// Following the run: server-sent events, opened again wherever they broke off.

const SILENCE = 10000; // milliseconds; the server sends something every two seconds
const RETRY = 1000;

// listener: { message(data), connected(isConnected), ended() }
function follow(listener) {
  let source = null;
  let last = "";
  let watchdog = 0;

  const again = () => {
    clearTimeout(watchdog);
    source.close();
    listener.connected(false);
    setTimeout(open, RETRY);
  };
  const alive = () => {
    clearTimeout(watchdog);
    watchdog = setTimeout(again, SILENCE);
  };
  const open = () => {
    source = new EventSource(last ? `events?after=${encodeURIComponent(last)}` : "events");
    source.onopen = () => {
      alive();
      listener.connected(true);
    };
    source.onmessage = (event) => {
      alive();
      last = event.lastEventId;
      listener.message(JSON.parse(event.data));
    };
    source.addEventListener("beat", alive);
    source.addEventListener("end", () => {
      clearTimeout(watchdog);
      source.close();
      listener.ended();
    });
    source.onerror = again;
    alive();
  };
  open();
}

export { follow };
