"""The network between hosts: one port per server, mutual TLS on all connections, and the relay.

Possible attackers, what each can do, what not, and the tests that show it. "Nothing" means: no
code run, no file read or written, no tensor seen, no run ended.

    A stranger on the network
        can     open connections, a bounded number for a bounded time; see which hosts exchange how
                many bytes
        cannot  get past TLS 1.3 without a certificate of the authority: nothing
        shown   test_fuzz, test_strangers, test_neighbours, test_revocation
    Another user of a host
        can     look at the page and the metrics that are served on loopback; occupy a port first
        cannot  be taken for the user on either side of a connection: nothing, and a server of
                theirs does not get a byte. If the kernel makes no network namespaces, they can
                reach the workers' ports; a warning says so, and the unpickler guards these
        shown   test_localpeer, test_neighbours, test_tunnel
    The holder of a stage's certificate (of its host, or of a job's code on it)
        can     serve that stage: see its inputs, ask others for outputs and samples of the step
                under way, send wrong activations, gradients and parameters, end the job; call the
                methods for members, while the job runs and the stage belongs to it; fill its own
                share of memory and links
        cannot  make another host's process do anything outside of the protocol: call operators or
                functions, read or write files, address memory; read other stages' snapshots, or be
                another member; tell the next driver of a run that no driver has recorded, or that
                one has ended; have a spare join that no driver has invited; outside of the group:
                learn more than the health service tells
        shown   test_rpc_inspection, test_hostile_member, test_unpickler, test_roles, test_believed,
                test_driver_record, test_takeover, test_membership
    The holder of a spare's certificate
        can     all that, for any stage
        shown   test_roles
    The holder of the driver's certificate
        can     run code on the hosts, confined as below, or with --allow and --no-code only code
                that they have; read and write checkpoints beneath --checkpoints, other jobs' too;
                take over a job whose driver was lost; stop servers
        cannot  reach keys, homes, other data, or the server itself
        shown   test_confinement, test_allow, test_operations
    A job's code, whoever its author
        can     use the network, compute, and slow down its host; read what every user of the host
                may, what --data and `[data] paths` grant, and the job's own files; see the names
                and owners of other files; end its own server's work for the job
        cannot  reach the rest, make a server of its user work for it, write to a terminal, or
                outlive the job; a job that is not confined can do everything that its user may
        shown   test_confinement, test_believed, test_localpeer
    The author of a file that is opened: a trace, a run folder, a checkpoint, a config
        can     give it untrue contents; a config names code, as a program does
        cannot  execute anything by data, fill memory, or control the terminal
        shown   test_hostile_files, test_visible, test_checkpoint
    The holder of the authority's key
        can     be any of them, until every host has another authority; but no website for a
                browser that trusts it
        shown   test_revocation

A certificate that was lost is revoked: `rpcmp certs revoke`, and ca.crl copied to every host.

Start at `port.py` for connections that arrive, and at `peer_connection.py` for those to servers;
`security.py` refuses peers without a certificate. May import process and config; never torch.
"""
