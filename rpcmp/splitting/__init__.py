"""An unmodified `nn.Module`, cut into layers that a pipeline takes like any others.

    module ──exporting──> two graphs of operations ──cutting──> programs ──layer──> nn.Module each
                          (training, evaluation)     at blocks   plain data

`torch.export` follows the module's own `forward` once in each mode. The graph is cut where one of
its repeated blocks ends, so a layer is a block, or what lies before, between or after them. What is
alive at a cut passes from layer to layer: hidden states, masks, rotary tables, sizes.
"""
