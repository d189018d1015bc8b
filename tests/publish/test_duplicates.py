"""Several ranks offer the same tensor: who writes it, and when they disagree."""

from __future__ import annotations

import pytest

from gpusync.errors import PublishError
from gpusync.publish.duplicates import Seen, check_agreement, choose_owners, stored_in_vain
from gpusync.publish.tensors import TensorForm

FORM = TensorForm(dtype="F32", shape=(2,), nbytes=8)


def seen(identity: str = "same", *, written: bool = True, form: TensorForm = FORM) -> Seen:
    return Seen(form=form, identity=identity, written_as="xor" if written else "", changed_bytes=1)


def test_owners_are_spread_over_the_ranks_that_offer():
    names = [f"layer.{i}.weight" for i in range(1000)]
    owners = choose_owners([names, None, names, ["only here"]])
    assert owners.keys() == set(names)
    counts = [list(owners.values()).count(rank) for rank in range(4)]
    assert (counts[1], counts[3]) == (0, 0)
    assert min(counts[0], counts[2]) > 400
    assert owners == choose_owners([names, None, names, ["only here"]])


def test_equal_bytes_are_agreed_on():
    check_agreement([{"a": seen(), "b": seen("x")}, {"a": seen(written=False)}, {}])


@pytest.mark.parametrize(
    "other",
    [seen("other"), seen(form=TensorForm(dtype="F32", shape=(2, 1), nbytes=8))],
    ids=["bytes", "form"],
)
def test_different_bytes_or_forms_are_not(other):
    with pytest.raises(PublishError, match="ranks 0 and 2 offer different bytes") as caught:
        check_agreement([{"a": seen()}, {}, {"a": other}])
    assert caught.value.tensor == "a"


def test_the_first_rank_that_stored_a_tensor_keeps_it():
    manifests = [{"a": seen(written=False)}, {"a": seen(), "b": seen()}, {"a": seen(), "b": seen(), "c": seen()}]
    assert [stored_in_vain(manifests, rank) for rank in range(3)] == [set(), set(), {"a", "b"}]
