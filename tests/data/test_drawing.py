"""Random functions of torch draw from given generators in the context of a Drawing."""

from __future__ import annotations

import inspect
import threading
import types
from itertools import chain

import pytest
import torch
from torch.nn import functional as F

from tests.support.api import drawing

ONES = torch.ones(6, 6)
DRAWS = {
    "rand": lambda: torch.rand(6, 6),
    "randn": lambda: torch.randn(6, 6),
    "randint": lambda: torch.randint(99, (6, 6)),
    "randperm": lambda: torch.randperm(36),
    "normal": lambda: torch.normal(0.0, ONES),
    "bernoulli": lambda: torch.bernoulli(ONES / 2),
    "multinomial": lambda: torch.multinomial(ONES, 6),
    "poisson": lambda: torch.poisson(ONES * 99),
    "binomial": lambda: torch.binomial(ONES * 99, ONES / 2),
    "_standard_gamma": lambda: torch._standard_gamma(ONES),
    "_sample_dirichlet": lambda: torch._sample_dirichlet(ONES),
    "uniform_": lambda: torch.empty(6, 6).uniform_(),
    "normal_": lambda: torch.nn.init.normal_(torch.empty(6, 6)),
    "bernoulli_": lambda: torch.empty(6, 6).bernoulli_(0.5),
    "random_": lambda: torch.empty(6, 6).random_(99),
    "exponential_": lambda: torch.empty(6, 6).exponential_(),
    "cauchy_": lambda: torch.empty(6, 6).cauchy_(),
    "geometric_": lambda: torch.empty(6, 6).geometric_(0.01),
    "log_normal_": lambda: torch.empty(6, 6).log_normal_(),
    "kaiming_uniform_": lambda: torch.nn.init.kaiming_uniform_(torch.empty(6, 6)),
    "rand_like": lambda: torch.rand_like(ONES),
    "randn_like": lambda: torch.randn_like(ONES),
    "randint_like": lambda: torch.randint_like(ONES, 99),
}


def tagged():
    """Names of the dispatcher's operators that draw."""
    names = set()
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        base, _, overload = rest.partition(".")
        packet = getattr(getattr(torch.ops, namespace), base, None)
        operator = getattr(packet, overload or "default", None)
        if operator and torch.Tag.nondeterministic_seeded in operator.tags:
            names.add((namespace, base))
    return names


def callables(name):
    """What Python code can call by this name of an operator, but torch.ops."""
    places = torch, torch.Tensor, torch._C._nn, torch._VF, F
    return [place for place in places if callable(getattr(place, name, None))]


def python_functions_that_draw():
    """Functions of torch in Python that the mode sees, and inside which something draws."""
    drawn = drawing.DRAWN | drawing.REFUSED | {*drawing.FILLED_BY}
    done = {}

    def names(code):
        inner = [names(c) for c in code.co_consts if isinstance(c, types.CodeType)]
        return {*code.co_names}.union(*inner)

    def draws(function):
        function = inspect.unwrap(function)
        if not isinstance(function, types.FunctionType):
            return False
        if function not in done:
            done[function] = False
            called = names(function.__code__)
            inner = [function.__globals__.get(name) for name in called]
            inner = [f for f in inner if getattr(f, "__module__", "").startswith("torch")]
            done[function] = bool(called & drawn) or any(map(draws, inner))
        return done[function]

    listed = chain.from_iterable(torch.overrides.get_overridable_functions().values())
    seen = {f for f in listed if isinstance(f, types.FunctionType)}
    return sorted(f.__name__ for f in seen if draws(f))


def test_every_operator_that_draws_is_given_a_generator_or_refused():
    operators = {name for _, name in tagged()}
    assert {"rand", "dropout", "normal_", "lstm"} < operators and len(operators) > 50
    listed = drawing.DRAWN | drawing.REFUSED | {*drawing.FILLED_BY}
    assert {name for name in operators if callables(name)} <= listed
    assert len(names := python_functions_that_draw()) > 10 and {*names} <= listed
    assert DRAWS.keys() == drawing.DRAWN | drawing.FILLED_BY.keys()


def test_operators_called_as_torch_ops_are_refused():
    with drawing.Drawing(0):
        for namespace, name in tagged():
            with pytest.raises(drawing.DrawError, match=name):
                getattr(getattr(torch.ops, namespace), name)()
        with pytest.raises(drawing.DrawError, match="aten.rand.default"):
            torch.ops.aten.rand.default([2])
        assert torch.ops.aten.add(ONES, 1).sum() == 72


@pytest.mark.parametrize("name", sorted(DRAWS))
def test_a_function_draws_from_the_key_alone_and_changes_no_generator(name):
    def draw(key):
        with drawing.Drawing(key):
            return DRAWS[name]()

    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = draw(5)
    torch.rand(3)
    torch.manual_seed(1)
    assert torch.equal(draw(5), first)
    assert not torch.equal(draw(6), first)
    assert torch.equal(torch.get_rng_state(), before)
    plain = DRAWS[name]()
    assert not torch.equal(torch.get_rng_state(), before)
    assert (plain.dtype, plain.shape) == (first.dtype, first.shape)


def test_values_have_the_distribution_of_the_function():
    with drawing.Drawing(3):
        like = torch.zeros(9999, dtype=torch.float64)
        assert (torch.rand_like(like).mean() - 0.5).abs() < 0.02
        assert (torch.randn_like(like, dtype=torch.float32).std() - 1).abs() < 0.05
        assert torch.randint_like(like, 3).unique().tolist() == [0, 1, 2]
        assert torch.randint_like(like, -1, 2).unique().tolist() == [-1, 0, 1]
        assert torch.randint_like(like, low=4, high=6).unique().tolist() == [4, 5]
        assert torch.rand_like(like, dtype=torch.float16, requires_grad=True).requires_grad
        assert not torch.equal(torch.rand(9), torch.rand(9))


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("dropout", lambda: F.dropout(ONES)),
        ("dropout2d", lambda: torch.nn.Dropout2d()(ONES[None, None])),
        ("alpha_dropout", lambda: torch.alpha_dropout(ONES, 0.5, True)),
        ("gumbel_softmax", lambda: F.gumbel_softmax(ONES)),
        ("rrelu", lambda: torch.rrelu(ONES, training=True)),
        ("fractional_max_pool2d", lambda: F.fractional_max_pool2d(ONES[None], 2, 3)),
        ("scaled_dot_product_attention", lambda: F.scaled_dot_product_attention(ONES, ONES, ONES)),
        ("rand", lambda: torch.rand(2, generator=torch.Generator())),
        ("bernoulli", lambda: torch.bernoulli(ONES, generator=torch.default_generator)),
    ],
)
def test_what_cannot_be_given_a_generator_is_refused_by_name(name, call):
    with drawing.Drawing(0), pytest.raises(drawing.DrawError, match=name):
        call()
    call()


def test_other_threads_draw_as_before():
    """Dropout draws in the main thread while a transform runs in that of the loader."""
    torch.manual_seed(7)
    expected = torch.rand(50)
    entered = threading.Event()
    left = threading.Event()
    drawn = []

    def draw():
        with drawing.Drawing(9):
            entered.set()
            drawn.append(torch.rand(50))
            left.wait(60)
            drawn.append(torch.rand(50))

    thread = threading.Thread(target=draw)
    torch.manual_seed(7)
    thread.start()
    entered.wait(60)
    first = torch.rand(25)
    left.set()
    thread.join()
    assert torch.equal(torch.cat([first, torch.rand(25)]), expected)
    with drawing.Drawing(9):
        assert torch.equal(torch.rand(50), drawn[0]) and torch.equal(torch.rand(50), drawn[1])


def test_the_first_numbers_do_not_depend_on_how_many_follow():
    """Of a batch, a sample alone is transformed as at the head of others."""
    for draw in (torch.rand, lambda n: torch.poisson(torch.full((n,), 99.0)), torch.randn):
        sizes = (16, 64) if draw is torch.randn else (1, 64)
        parts = []
        for size in sizes:
            with drawing.Drawing(2):
                torch.rand(size)  # as many other numbers as samples were drawn before
                parts.append(draw(size))
        assert torch.equal(parts[0], parts[1][: sizes[0]])
