"""One tensor's way from an offer to what is written: compare, encode, checksum. Runs on a thread of the pool."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from gpusync.codec import U8, Payload, choose_payload, encode_overwrite, encode_xor
from gpusync.codec.windows import iterate_windows
from gpusync.digest import new_digest, payload_checksum
from gpusync.errors import LayoutError, PublishError, Where
from gpusync.publish.changes import Change, differs, find_change, read_whole
from gpusync.publish.report import Stopwatch
from gpusync.publish.snapshot import Snapshot
from gpusync.publish.tensors import Offer, TensorForm
from gpusync.stream import element_bytes, is_float_order
from gpusync.stream.formats import GPUSYNC, OVERWRITE, PAYLOAD_DTYPE, XOR
from gpusync.stream.writer import Buffer

# A tensor that lies in a file is read whole up to this size, and in windows, once for each pass, above it.
WHOLE_BYTES = 64 << 20

# What carries the bits of a narrow dtype that numpy lacks, and the narrow dtypes that it has.
_CARRIERS = {"U8", "I8", "U16", "I16"}
_NUMPY_DTYPES = {*_CARRIERS, "BOOL", "F16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """What of a tensor goes into a shard: a payload, or in a full version its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: Buffer
    checksum: str
    payload_checksum: str

    @property
    def nbytes(self) -> int:
        return self.data.nbytes if hasattr(self.data, "nbytes") else len(self.data)


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """What became of an offer. `stored` is None where nothing is to be written.

    `identity` tells states apart among ranks, where it was asked for. `changed_bytes` counts against the version that
    the new one is made on; `change`, kept for the snapshot, and `moved` are against the newest one. `first` means that
    nothing was known of the tensor's old state, and the offered one was taken for it.
    """

    name: str
    form: TensorForm
    identity: str | None
    stored: Stored | None = None
    changed_bytes: int = 0
    change: Change | None = None
    moved: bool = False
    first: bool = False
    written_as: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEncoder:
    """How tensors of one version are encoded. `encoding` None: a full version. `identify`: states are to be told apart
    by `Encoded.identity`. `base` is what the version is made on: the snapshot itself, or an older state. Used by
    several threads.
    """

    snapshot: Snapshot
    base: Snapshot
    encoding: str | None
    checksum: str
    identify: bool
    watch: Stopwatch
    version: int

    def encode(self, offer: Offer) -> Encoded:
        """Errors: LayoutError for another form than the readers hold, PublishError and what encoders raise."""
        self._check_form(offer)
        with self.watch.stage("read"):
            new = self._read(offer)
            newest = self.snapshot.open(offer.name)
            old = self._open_base(offer.name, newest)
        with self.watch.stage("compare"):
            new = self._pin(offer, newest, new)
            change = Change(changed_bytes=0) if new is newest else self._compare(offer, newest, new)
            changed_bytes = (change if old is newest else self._compare(offer, old, new, keep=False)).changed_bytes
        if self.encoding is None:
            encoded = self._encode_full(offer, new)
        elif old is not None and changed_bytes:
            encoded = self._encode_delta(offer, old, new)
        else:
            identity = self._identity(new) if self.identify else None
            encoded = Encoded(name=offer.name, form=offer.form, identity=identity)
        return replace(
            encoded,
            changed_bytes=changed_bytes,
            change=change,
            moved=change.changed_bytes > 0,
            first=newest is None,
        )

    def identify_only(self, offer: Offer) -> Encoded:
        """For a tensor that another rank writes."""
        self._check_form(offer)
        with self.watch.stage("read"):
            new = self._read(offer)
        return Encoded(name=offer.name, form=offer.form, identity=self._identity(new))

    def encode_unoffered(self, offer: Offer) -> Stored | None:
        """For a tensor that no rank offers, in its newest state: what changed since the base, None if nothing did."""
        with self.watch.stage("read"):
            new = self._read(offer)
            old = self._open_base(offer.name, None)
        with self.watch.stage("compare"):
            change = self._compare(offer, old, new, keep=False)
        return self._encode_delta(offer, old, new).stored if old is not None and change.changed_bytes else None

    def store_whole(self, name: str, form: TensorForm, data: U8 | Payload) -> Stored:
        """The tensor as a full version holds it."""
        with self.watch.stage("read"):
            whole = read_whole(data)
        return Stored(
            name=name,
            dtype=form.dtype,
            shape=form.shape,
            data=whole,
            checksum=self._digest(self.checksum, whole),
            payload_checksum=payload_checksum(whole),
        )

    def _check_form(self, offer: Offer) -> None:
        expected = self.snapshot.form(offer.name)
        if expected is not None and expected != offer.form:
            raise LayoutError(
                "tensor offered has another form than the readers hold" + _advice(expected, offer.form),
                where=self._where(offer.name),
                expected=expected,
                found=offer.form,
            )

    def _read(self, offer: Offer) -> U8 | Payload:
        return read_whole(offer.data) if offer.form.nbytes <= WHOLE_BYTES else offer.data

    def _pin(self, offer: Offer, newest: U8 | Payload | None, new: U8 | Payload) -> U8 | Payload:
        """The state that is published: one that nobody changes any more, so that the comparison, the checksum, the
        payload and the snapshot all speak of the same bytes while a trainer runs on. Borrowed memory is copied, but not
        where it is found to be as in the newest version, which is then taken instead.
        """
        if not offer.borrowed:
            return new
        if self.encoding is not None and newest is not None and not differs(newest, new):
            return newest
        return read_whole(new).copy()

    def _open_base(self, name: str, newest: U8 | Payload | None) -> U8 | Payload | None:
        """The state that the payload is made against. A tensor that no reader holds is not in an older base either."""
        if self.base is self.snapshot or self.snapshot.lacks(name):
            return newest
        old = self.base.open(name)
        if old is None:
            raise PublishError("tensor is not in the older version to publish on", where=self._where(name))
        return old

    def _compare(
        self, offer: Offer, old: U8 | Payload | None, new: U8 | Payload, *, keep: bool | None = None
    ) -> Change:
        keep = self.snapshot.keeps if keep is None else keep
        if old is not None:
            return find_change(old, new, keep=keep)
        whole = read_whole(new) if keep else None
        return Change(changed_bytes=0 if self.encoding is not None else offer.form.nbytes, whole=whole)

    def _encode_full(self, offer: Offer, new: U8 | Payload) -> Encoded:
        stored = self.store_whole(offer.name, offer.form, new)
        return Encoded(
            name=offer.name,
            form=offer.form,
            identity=self._identity(new, stored.checksum) if self.identify else None,
            stored=stored,
            written_as="full",
        )

    def _encode_delta(self, offer: Offer, old: U8 | Payload, new: U8 | Payload) -> Encoded:
        if self.snapshot.lacks(offer.name):
            raise PublishError(
                "tensor changed, but the checkpoint of the readers does not have it: publish a full version first",
                where=self._where(offer.name),
            )
        checksum = self._digest(self.checksum, new)
        with self.watch.stage("encode"):
            payload, written_as = self._payload(offer, old, new)
        if payload is None:
            raise PublishError("encoder and comparison disagree", where=self._where(offer.name))
        stored = Stored(
            name=offer.name,
            dtype=PAYLOAD_DTYPE,
            shape=(len(payload),),
            data=payload,
            checksum=checksum,
            payload_checksum=payload_checksum(payload),
        )
        return Encoded(
            name=offer.name,
            form=offer.form,
            identity=self._identity(new, checksum) if self.identify else None,
            stored=stored,
            written_as=written_as,
        )

    def _payload(self, offer: Offer, old: U8 | Payload, new: U8 | Payload) -> tuple[bytes | None, str]:
        where = self._where(offer.name)
        if self.encoding == GPUSYNC:
            dtype = offer.form.dtype
            return choose_payload(
                old, new, element_bytes=element_bytes(dtype), float_order=is_float_order(dtype), where=where
            )
        return _SLIME_ENCODERS[self.encoding or ""](old, new, where=where), self.encoding or ""

    def _digest(self, algorithm: str, data: U8 | Payload) -> str:
        with self.watch.stage("digest"):
            digest = new_digest(algorithm)
            for window in iterate_windows(data):
                digest.update(window)
            return digest.hexdigest()

    def _identity(self, new: U8 | Payload, checksum: str | None = None) -> str:
        """adler32 is too weak to say that two ranks hold the same bytes."""
        if checksum is not None and self.checksum != "adler32":
            return checksum
        return self._digest("xxh3-128" if self.checksum == "adler32" else self.checksum, new)

    def _where(self, name: str) -> Where:
        return Where(version=self.version, tensor=name)


def _advice(expected: TensorForm, found: TensorForm) -> str:
    """What to do about integers that seem to carry the bits of a dtype that numpy lacks."""
    is_carried = found.dtype in _CARRIERS and expected.dtype not in _NUMPY_DTYPES
    if not (is_carried and expected.shape == found.shape and expected.nbytes == found.nbytes):
        return ""
    return (
        f" (offer bits as StoredBytes(dtype={expected.dtype!r}, shape=array.shape, data=array.tobytes()), "
        "an array of ml_dtypes or a torch tensor)"
    )


_SLIME_ENCODERS: dict[str, Callable[..., bytes | None]] = {XOR: encode_xor, OVERWRITE: encode_overwrite}
PUBLISH_ENCODINGS = (*_SLIME_ENCODERS, GPUSYNC)
