"""`rpcmp serve` of somebody who has a stage's certificate, and tells drivers what suits him.

python false_stage.py ANSWER ... serve OPTIONS: ANSWER is a JSON of what each Recall is answered.
"""

import json
import sys

from google.protobuf.json_format import ParseDict

from rpcmp.cli import main
from rpcmp.server.driver_memory import DriverMemory
from rpcmp.v1 import control_pb2 as pb

TOLD = ParseDict(json.loads(sys.argv[1]), pb.RecallResponse())


def recall(memory: DriverMemory, is_claimed: bool) -> pb.RecallResponse:
    """Return the lie, instead of what the server remembers."""
    return TOLD


setattr(DriverMemory, "recall", recall)  # noqa: B010  # for mypy no method is a variable
del sys.argv[1 : sys.argv.index("serve")]
main()
