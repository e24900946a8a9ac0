"""What is asked of a model and its loss in the first steps: micro-batches must be a mini-batch.

    first_forward        what a forward's graph shows, and all that is asked after it
    second_forward       does it give the same again, once what it keeps was put back?
    training_check       are samples computed by themselves, and do their gradients add up?
    objective            is the loss of micro-batches that of the mini-batch?
    parameter_hooks, injected_gradients, inner_gradients
                         what changes gradients on their way

Each refuses by name, with what to do, before the step is taken; the guide's page on promises has a
table. A stage needs none of it to train.
"""
