"""How the ranks of an engine decide together: over their own gloo group and store, never over the engine's.

`open_group` attaches, `guard` makes a verdict of a rank's work, `Group.agree` a decision of all verdicts. Works without
torch for a process alone.
"""

from gpusync.verdict.attach import open_group
from gpusync.verdict.errors import GroupFailedError, HandshakeError, InDoubtError, StoreLostError
from gpusync.verdict.group import Group, Traffic, take_step
from gpusync.verdict.hosts import HostIdentity, Hosts, this_host
from gpusync.verdict.members import Members
from gpusync.verdict.verdict import OK, Decision, Failure, Verdict, guard

__all__ = [
    "OK",
    "Decision",
    "Failure",
    "Group",
    "GroupFailedError",
    "HandshakeError",
    "HostIdentity",
    "Hosts",
    "InDoubtError",
    "Members",
    "StoreLostError",
    "Traffic",
    "Verdict",
    "guard",
    "open_group",
    "take_step",
    "this_host",
]
