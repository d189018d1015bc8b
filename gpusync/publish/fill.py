"""Tensors that no rank offers are as the newest version has them: what a new version must say of them all the same."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from gpusync.errors import PublishError, Where
from gpusync.publish.encode import Stored, TensorEncoder
from gpusync.publish.pool import map_in_order
from gpusync.publish.snapshot import Snapshot
from gpusync.publish.tensors import Offer, TensorForm

Keep = Callable[[Stored], None]


def fill_full(
    names: Collection[str], *, encoder: TensorEncoder, snapshot: Snapshot, keep: Keep, where: Where
) -> dict[str, TensorForm]:
    """A full version holds every tensor: give those of `names` to `keep`, whole. Returns their forms."""
    filled = {}
    for offer in _newest(names, snapshot, where):
        filled[offer.name] = offer.form
        keep(encoder.store_whole(offer.name, offer.form, offer.data))
    return filled


def fill_shortcut(
    names: Collection[str], *, encoder: TensorEncoder, snapshot: Snapshot, keep: Keep, where: Where, workers: int
) -> dict[str, TensorForm]:
    """A delta on an older version holds what has changed since: give payloads for those of `names` that have to
    `keep`. Returns the forms of these. Reads all of `names`, in both states.
    """
    forms = {name: form for name in names if (form := snapshot.form(name)) is not None}
    filled = {}
    for stored in map_in_order(encoder.encode_unoffered, _newest(names, snapshot, where), workers=workers):
        if stored is not None:
            filled[stored.name] = forms[stored.name]
            keep(stored)
    return filled


def _newest(names: Collection[str], snapshot: Snapshot, where: Where) -> Iterator[Offer]:
    for name in sorted(names):
        form, data = snapshot.form(name), snapshot.open(name, hold=False)
        if form is None or data is None:
            raise PublishError("the state of a tensor that no rank offers is not known", where=where, tensor=name)
        yield Offer(name=name, form=form, data=data)
