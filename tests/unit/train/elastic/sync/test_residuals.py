"""What compressors keep back, as ranks leave and come: its sum, to the last bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from stoker_train.elastic.sync.residuals import heirs

if TYPE_CHECKING:
    from tests.unit.train.elastic.rank_processes import RankProcesses


def test_a_rank_hands_on_to_one_that_stays() -> None:
    assert heirs(4, {0, 2}) == {1: 2, 3: 2}
    assert heirs(5, {1, 2, 4}) == {0: 1, 3: 1}
    assert heirs(3, {0, 1, 2}) == {}
    assert heirs(2, set()) == {}


@pytest.mark.parametrize("staying", [{0, 2}, {1, 2, 3}, {3}])
@pytest.mark.parametrize("name", ["topk", "onebit"])
def test_the_sum_of_what_is_kept_back_stays(
    ranks: RankProcesses, seed: int, name: str, staying: set[int]
) -> None:
    """Whole numbers, so that sums are exact in any order. One tensor is not yet known to rank 3."""
    import torch

    answers = ranks.run(_handed_on, 4, name, sorted(staying), seed % 1000)
    for tensor in ("a", "b"):
        before = sum(one[0][tensor] for one in answers if tensor in one[0])
        after = sum(one[1][tensor] for one in answers if tensor in one[1])
        assert torch.equal(before, after)
    for rank, (before, after, scaled) in enumerate(answers):
        assert rank in staying or not any(one.any() for one in after.values())
        if rank in staying:
            assert before.keys() <= after.keys()
            for tensor, one in after.items():
                torch.testing.assert_close(scaled[tensor], one * len(staying) / 4)
                if len(staying) != 3:  # a power of 2: exact
                    assert torch.equal(scaled[tensor] / len(staying), one / 4)


def _handed_on(rank: int, world: int, name: str, staying: list[int], seed: int) -> Any:
    """Return what is kept back before, after, and in the group of those that stay."""
    import torch

    from stoker_train.elastic.sync import make_strategy
    from stoker_train.elastic.sync.exchange import GradientExchange
    from stoker_train.elastic.sync.residuals import hand_on, heirs

    generator = torch.Generator().manual_seed(seed + rank)
    params = [torch.nn.Parameter(torch.ones(5, 3)), torch.nn.Parameter(torch.ones(7))]
    strategy = make_strategy({"name": "all_reduce", "compression": name})
    exchange = GradientExchange(params)
    strategy.reset(exchange)
    compressor = strategy.compressor
    assert compressor is not None
    assert compressor.residual is not None
    for number, tensor in enumerate(("a", "b")[: 1 if rank == 3 else 2]):
        kept = torch.randint(-99, 99, (params[number].numel(),), generator=generator).float()
        compressor.memory(tensor)[compressor.residual] = kept

    def kept_back() -> dict[str, Any]:
        assert compressor.residual is not None
        return {
            one: compressor.memory(one)[compressor.residual].clone() for one in compressor.names()
        }

    before = kept_back()
    hand_on(compressor, heirs(world, set(staying)))
    after = kept_back()
    # As a rank that goes on from its own state, which a commit holds, in a group of another size.
    other = make_strategy(strategy.spec())
    other.load_rank_state_dict(strategy.rank_state_dict())
    exchange.workers = len(staying)
    other.reset(exchange)
    compressor = other.compressor
    assert compressor is not None
    scaled = kept_back()
    exchange.close()
    return before, after, scaled
