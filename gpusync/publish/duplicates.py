"""A tensor that several ranks offer: written once if they agree on it, an error if they do not. Pure."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from gpusync.errors import PublishError
from gpusync.publish.tensors import TensorForm


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What one rank says of a tensor it offers.

    `identity` tells states apart: the same for equal bytes. `written_as` names the form it has stored the tensor in, ""
    if it has not. `changed_bytes` is 0 where another rank is known to write it. `moved`: it is not as in the newest
    version.
    """

    form: TensorForm
    identity: str | None
    written_as: str
    changed_bytes: int
    moved: bool = False


Manifest = Mapping[str, Seen]


def choose_owners(offered: Sequence[Collection[str] | None]) -> dict[str, int]:
    """The rank that writes each tensor which more than one rank is known to offer, spread over them.

    `offered` holds each rank's names, None where they are not known before they come.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, names in enumerate(offered):
        for name in names or ():
            ranks_of.setdefault(name, []).append(rank)
    # crc32: the same on every rank, as the built-in hash is not
    return {
        name: ranks[zlib.crc32(name.encode("utf-8")) % len(ranks)] for name, ranks in ranks_of.items() if len(ranks) > 1
    }


def check_agreement(manifests: Sequence[Manifest]) -> None:
    """Raises PublishError, the same on every rank, for a tensor of which two ranks offer different bytes or forms."""
    first: dict[str, int] = {}
    for rank, manifest in enumerate(manifests):
        for name, seen in manifest.items():
            earlier = first.setdefault(name, rank)
            known = manifests[earlier][name]
            if (known.form, known.identity) != (seen.form, seen.identity):
                raise PublishError(
                    f"ranks {earlier} and {rank} offer different bytes for the same tensor",
                    tensor=name,
                    expected=f"{known.form} {known.identity}",
                    found=f"{seen.form} {seen.identity}",
                )


def stored_in_vain(manifests: Sequence[Manifest], rank: int) -> set[str]:
    """The tensors that `rank` has stored, and a rank before it too."""
    before = {name for manifest in manifests[:rank] for name, seen in manifest.items() if seen.written_as}
    return {name for name, seen in manifests[rank].items() if seen.written_as and name in before}
