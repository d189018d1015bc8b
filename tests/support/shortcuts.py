"""States that several processes publish as deltas on older versions, and that a test expects."""

from __future__ import annotations

from support.checkpoints import State, changed


def older_states(state: State) -> list[State]:
    """Version by version, of six; the first is `state`."""
    states = [state]
    for seed in (1, 2, 3):
        states.append(changed(states[-1], seed))
    # Some are back where they were in version 1.
    back = ("step", "layer.0.scale", "layer.0.codes", "layer.1.weight")
    states.append({**changed(states[-1], 4), **{name: states[1][name] for name in back}})
    states.append(changed(states[-1], 5))
    states.append(changed(states[-1], 6, names=["step"]))
    return states
