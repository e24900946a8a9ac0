"""From host to host: one port a server, mutual TLS on all that crosses it, and the relay.

Who may be an attacker, what each can do, what not, and the tests that show it. "Nothing" means: no
code run, no file read or written, no tensor seen, no run ended.

A stranger on the network
    can     open connections, a bounded number for a bounded time; see who talks to whom, how much
    cannot  get past TLS 1.3 without a certificate of the authority: nothing
    shown   test_fuzz, test_strangers, test_neighbours, test_revocation
Another user of a host
    can     look at the page and the metrics that are served on loopback; hold a port first
    cannot  be taken for the user on either side of a connection: nothing, and a server of theirs
            gets not a byte. Where the kernel makes no network namespaces, workers listen in reach
            of them; a warning says so, and the unpickler stands
    shown   test_localpeer, test_neighbours, test_tunnel
The holder of a stage's certificate (of its host, or of a job's code on it)
    can     serve that stage: see what it is sent, send wrong activations, gradients and parameters,
            end the job; ask what members ask, as long as the job runs and it is of the group; fill
            its own share of memory and links
    cannot  have another host's process do what is not of the protocol: call operators or functions,
            read or write files, address memory; read other stages' snapshots, or be another member;
            outside of the group: learn more than health tells
    shown   test_rpc_inspection, test_hostile_member, test_unpickler, test_roles, test_believed
The holder of a spare's certificate
    can     all that, for any stage
    shown   test_roles
The holder of the driver's certificate
    can     run code on the hosts, confined as below, or with --allow and --no-code only what they
            have; read and write checkpoints beneath --checkpoints, other jobs' too; stop servers
    cannot  reach keys, homes, other data, or the server itself
    shown   test_confinement, test_allow
A job's code, whoever has written it
    can     use the network, compute, and slow down its host; read what every user of the host may,
            what --data and `[data] paths` grant, and the job's own files; see which files there
            are, and whose; end its own server's work for the job
    cannot  reach the rest, have a server of its user work for it, write to a terminal, or outlive
            the job; a job that is not confined can do what its user may
    shown   test_confinement, test_believed, test_localpeer
The author of a file that is opened: a trace, a run folder, a checkpoint, a config
    can     have it say what is not so; a config names code, as a program does
    cannot  execute anything by data, fill memory, or drive the terminal
    shown   test_hostile_files, test_visible, test_checkpoint
The holder of the authority's key
    can     be any of them, until every host has another authority; but no website for a browser
            that trusts it
    shown   test_revocation

A certificate that was lost is revoked: `rpcmp certs revoke`, and ca.crl copied to every host.
"""
