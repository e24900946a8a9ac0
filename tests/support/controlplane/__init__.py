"""The control plane of a job in one event loop: all of it is real, except what computes.

    test ──> Cluster ──> StageServer ... and TrainingRun: real, with real gRPC over loopback
                              │ Forks                │ Forks
                         FakeWorker             FakeDriver       coroutines, each beside a process

A fake speaks its supervisor's channel protocol, meets the others by the rendezvous, beats, and
takes real snapshots of a "model" of one number per layer. The number after a step depends on all
steps before it, so a run that restores a wrong state, or repeats a step, ends with other losses and
another hash. A case takes some tenths of a second of CPU, and computes nothing with torch.

What this cannot show is shown by real processes: tests/cluster. Faults are planted by
`Cluster.fail_at(stage, step, how)`.
"""
