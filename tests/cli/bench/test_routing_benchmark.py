"""The router against one that knows every cache, in simulated time: what was asked of it holds."""

import pytest
from routing import TRACES, KnowsEveryCache, LeastLoaded, Ours, OursExact, PureAffinity, simulate


@pytest.mark.small(kind=[Ours])
@pytest.mark.parametrize("kind", [Ours, OursExact])
@pytest.mark.parametrize("trace", TRACES)
def test_hits_are_near_what_there_is_and_nobody_is_overloaded(trace: str, kind: type[Ours]) -> None:
    found, best = (simulate(4, TRACES[trace](4, 60), each) for each in (kind, KnowsEveryCache))
    assert found.hits >= 0.95 * best.hits
    assert found.spread <= 1.25  # of a short trace, which begins with nothing cached
    assert found.seconds < 1.1 * best.seconds


def test_the_traces_tell_routers_apart() -> None:
    """Each of the simple rules fails at one of them."""
    forgetful, best = (
        simulate(4, TRACES["conversations"](4, 60), kind) for kind in (LeastLoaded, Ours)
    )
    assert forgetful.hits < 0.7 * best.hits
    crowded = simulate(4, TRACES["one hot prefix"](4, 60), PureAffinity)
    assert crowded.spread > 2
