"""Loaders that raise, that wait for several tensors, that use threads, or that exchange what they should only write."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from gpusync.errors import LayoutError
from gpusync.layout import named_tensors, trace
from gpusync.layout.inline_threads import inline_thread_pools
from support.models import specs_of


def state(*names: str) -> dict[str, torch.Tensor]:
    return {name: torch.full((3,), float(number)) for number, name in enumerate(names)}


def module(*names: str) -> nn.Module:
    made = nn.Module()
    for name in names:
        made.register_parameter(name, nn.Parameter(torch.full((3,), 7.0), requires_grad=False))
    return made


def kinds(layout):
    return {name: placement.kind.value for name, placement in layout.placements.items()}


def test_the_tensor_a_loader_raises_for_is_opaque_and_the_others_are_not():
    model = module("a", "b", "c")

    def load(weights):
        for name, tensor in weights:
            if name == "b":
                raise KeyError(name)
            model.get_parameter(name).data.copy_(tensor)

    layout = trace(model, load, specs_of(state("a", "b", "c")))
    assert kinds(layout) == {"a": "direct", "b": "opaque", "c": "direct"}
    assert layout.placements["b"].reason == "the loader raised KeyError: 'b'"


def test_a_loader_may_raise_for_one_tensor_and_wait_for_others():
    model = module("a", "b")

    def load(weights):
        waiting = {}
        for name, tensor in weights:
            if name == "bad":
                raise RuntimeError("no such layer")
            waiting[name] = tensor
            if len(waiting) == 2:
                model.a.data.copy_(waiting["a"])
                model.b.data.copy_(waiting["b"])

    layout = trace(model, load, specs_of(state("a", "bad", "b")))
    assert kinds(layout) == {"a": "direct", "b": "direct", "bad": "opaque"}


def test_one_bad_tensor_among_many_does_not_take_a_run_of_the_loader_for_each():
    names = [f"p{number}" for number in range(64)]
    model, runs = module(*names), []

    def load(weights):
        runs.append(0)
        for name, tensor in weights:
            model.get_parameter(name).data.copy_(tensor if name != "p37" else tensor[:1][:, None, None, None])

    layout = trace(model, load, specs_of(state(*names)))
    assert [name for name, kind in kinds(layout).items() if kind == "opaque"] == ["p37"]
    assert len(runs) <= 2 + 2 * 7


def test_a_loader_that_always_raises_in_company_is_believed_tensor_by_tensor():
    model = module("a", "b")

    def load(weights):
        weights = list(weights)
        if len(weights) > 1:
            raise MemoryError("too many")
        for name, tensor in weights:
            if name in ("a", "b"):
                model.get_parameter(name).data.copy_(tensor)

    layout = trace(model, load, specs_of(state("a", "b", "c")))
    assert kinds(layout) == {"a": "direct", "b": "direct", "c": "opaque"}
    assert layout.elsewhere == {}
    # It may wait for a partner, it may be elsewhere: nobody knows.
    assert "MemoryError: too many; and given this tensor alone, it placed it nowhere" in layout.placements["c"].reason


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_work_that_a_loader_gives_to_a_thread_pool_is_seen(device):
    # On the meta device a copy that is not seen does nothing, and raises nothing either.
    with torch.device(device):
        model = module("a", "b")

    def load(weights):
        with ThreadPoolExecutor() as pool:
            futures = [pool.submit(model.get_parameter(name).data.copy_, tensor) for name, tensor in weights]
            list(pool.map(lambda name: model.get_parameter(name).data.sum(), ["a"]))
        for future in futures:
            future.result()

    layout = trace(model, load, specs_of(state("a", "b")))
    assert kinds(layout) == {"a": "direct", "b": "direct"}
    assert layout.untouched_bytes() == {}


def test_what_a_thread_pool_raises_comes_with_its_result():
    def fail():
        raise ValueError("not this one")

    with inline_thread_pools(), ThreadPoolExecutor() as pool:
        future = pool.submit(fail)
    with pytest.raises(ValueError, match="not this one"):
        future.result()


def test_thread_pools_of_other_threads_stay_threads():
    seen = []

    def work():
        with ThreadPoolExecutor() as pool:
            seen.append(pool.submit(threading.get_ident).result())

    with inline_thread_pools():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        own = ThreadPoolExecutor().submit(threading.get_ident).result()
    assert own == threading.get_ident()
    assert seen != [thread.ident]
    assert ThreadPoolExecutor.submit.__name__ == "submit"


def exchanges_the_parameter(model, weights):
    model.a = nn.Parameter(torch.zeros(5), requires_grad=False)
    for name, tensor in weights:
        model.get_parameter(name).data[:3].copy_(tensor)


def exchanges_the_data(model, weights):
    for name, tensor in weights:
        model.get_parameter(name).data = torch.zeros(3)
        model.get_parameter(name).data.copy_(tensor)


def exchanges_the_data_afterwards(model, weights):
    for name, tensor in weights:
        model.get_parameter(name).data.copy_(tensor)
        model.get_parameter(name).data = torch.zeros(3)


def changes_the_view(model, weights):
    for name, tensor in weights:
        param = model.get_parameter(name)
        param.data.copy_(tensor)
        param.data = param.data[:2]


def adds_a_parameter(model, weights):
    model.extra = nn.Parameter(torch.zeros(5), requires_grad=False)
    for name, tensor in weights:
        model.get_parameter(name).data.copy_(tensor)


EXCHANGES = [
    exchanges_the_parameter,
    exchanges_the_data,
    exchanges_the_data_afterwards,
    changes_the_view,
    adds_a_parameter,
]


@pytest.mark.parametrize("load", EXCHANGES)
def test_a_loader_that_exchanges_params_of_a_serving_model_is_an_error_and_undone(load):
    model = module("a", "b")
    before = named_tensors(model)
    forms = {name: (tensor, tensor.data_ptr(), tensor.shape) for name, tensor in before.items()}
    with pytest.raises(LayoutError, match="exchanged parameters") as caught:
        trace(model, lambda weights: load(model, weights), specs_of(state("a", "b")))
    assert caught.value.found in ("a", "extra")
    now = named_tensors(model)
    assert {name: (tensor, tensor.data_ptr(), tensor.shape) for name, tensor in now.items()} == forms
    assert all(tensor.tolist() == [7.0, 7.0, 7.0] for tensor in now.values())


@pytest.mark.parametrize("load", EXCHANGES[:4])
def test_on_a_twin_only_what_went_into_exchanged_params_is_opaque(load):
    model = module("a", "b")

    def load_both(weights):
        weights = dict(weights)
        load(model, [("a", weights["a"])])
        model.b.data.copy_(weights["b"])

    layout = trace(model, load_both, specs_of(state("a", "b")), is_twin=True)
    assert kinds(layout) == {"a": "opaque", "b": "direct"}


def test_a_param_that_becomes_the_checkpoints_tensor_is_opaque():
    with torch.device("meta"):
        twin = module("a")

    def load(weights):
        twin.a.data = dict(weights)["a"]

    layout = trace(twin, load, specs_of(state("a")), is_twin=True)
    assert layout.placements["a"].reason == "the loader keeps it as `a`"


def test_a_param_without_a_shape_yet_is_opaque():
    model = module("a")
    model.lazy = nn.parameter.UninitializedParameter(requires_grad=False)

    def load(weights):
        weights = dict(weights)
        model.a.data.copy_(weights["a"])
        if isinstance(model.lazy, nn.parameter.UninitializedParameter):
            model.lazy.materialize((3,))
        model.lazy.data.copy_(weights["lazy"])

    layout = trace(model, load, specs_of(state("a", "lazy")), is_twin=True)
    assert kinds(layout) == {"a": "direct", "lazy": "opaque"}


def test_a_param_without_plain_storage_is_refused():
    model = nn.Module()
    model.register_buffer("table", torch.eye(3).to_sparse())
    with pytest.raises(LayoutError, match="`table` has no plain storage"):
        trace(model, lambda weights: None, {})


def test_a_param_that_wraps_other_tensors_is_refused():
    class Wrapper(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise NotImplementedError

    model = nn.Module()
    wrapper = torch.Tensor._make_wrapper_subclass(Wrapper, (3,))
    model.register_buffer("sharded", wrapper)
    with pytest.raises(LayoutError, match="`sharded` has no plain storage") as caught:
        trace(model, lambda weights: None, {})
    assert "Wrapper" in caught.value.found


def test_tensors_that_a_module_merely_has_may_be_of_any_kind():
    model = module("a")
    model.table = torch.eye(3).to_sparse()
    model.pending = nn.parameter.UninitializedParameter(requires_grad=False)

    def load(weights):
        model.a.data.copy_(dict(weights)["a"])

    assert kinds(trace(model, load, specs_of(state("a")))) == {"a": "direct"}


def test_gradients_do_not_matter():
    model = nn.Linear(3, 2)
    forms = specs_of({"weight": torch.zeros(2, 3), "bias": torch.zeros(2)})

    def load(weights):
        for name, tensor in weights:
            model.get_parameter(name).copy_(tensor)

    assert kinds(trace(model, load, forms)) == {"weight": "direct", "bias": "direct"}


def test_torchs_own_load_state_dict_is_a_loader_like_any_other():
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    layout = trace(model, lambda weights: model.load_state_dict(dict(weights)), specs_of(model.state_dict()))
    assert set(kinds(layout).values()) == {"direct"}
    assert layout.placements.keys() == before.keys()
    assert layout.untouched_bytes() == {}
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
