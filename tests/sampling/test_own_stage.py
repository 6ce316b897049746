"""A stage of the sampler from outside the package, by public names: top-n-sigma."""

import numpy as np
import pytest
import torch

from nanoserve import SamplingParams
from nanoserve.engine.executor import SlotUpdate
from nanoserve.sampling.numba_sampler import NumbaSampler
from nanoserve.sampling.rows import Rows, tensor_of
from nanoserve.sampling.sampler import Sampler
from nanoserve.sampling.stages import register_stage


class TopNSigma:
    """Tang et al. 2024: keep what is within n standard deviations of the largest logit."""

    def wants(self, update: SlotUpdate) -> bool:
        return "top_n_sigma" in (update.params.extra_args or {})

    def apply(self, logits: torch.Tensor, rows: Rows) -> None:
        n = np.array([state.params.extra_args["top_n_sigma"] for state in rows.states], np.float32)
        with rows.part(logits) as part:
            border = part.amax(1) - tensor_of(n, part) * part.std(1)
            part.masked_fill_(part < border.unsqueeze(1), -torch.inf)


register_stage("top_n_sigma", f"{__name__}:TopNSigma")


@pytest.mark.parametrize("sampler_class", [Sampler, NumbaSampler])
def test_only_tokens_near_the_best_are_drawn_and_neighbours_draw_as_ever(
    sampler_class: type[Sampler],
) -> None:
    asked = {"temperature": 2.0, "extra_args": {"top_n_sigma": 1.0}}
    params = [SamplingParams(temperature=2.0), SamplingParams(**asked)]
    params += [SamplingParams(**asked, logit_bias={0: 100.0})]
    sampler = sampler_class(3, 200, torch.device("cpu"))
    for slot, own in enumerate(params):
        sampler.set_slot(SlotUpdate(slot, own, seed=7))
    row = torch.randn(200, generator=torch.Generator().manual_seed(0))
    near = set((row >= row.max() - row.std()).nonzero().flatten().tolist())
    slots, draws = np.repeat([0, 1, 2], 300), np.tile(np.arange(300), 3)
    drawn = sampler.sample(row.repeat(900, 1), slots, draws).token_ids.view(3, 300).tolist()
    alone = sampler.sample(row.repeat(300, 1), slots[:300], draws[:300]).token_ids.tolist()
    assert drawn[0] == alone and len(set(alone)) > len(near)
    assert set(drawn[1]) == near and len(near) < 30
    assert set(drawn[2]) == {0}  # it comes behind the bias


def test_a_name_or_a_place_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="'penalties' is already registered"):
        register_stage("penalties", f"{__name__}:TopNSigma")
    with pytest.raises(ValueError, match="before='race' must be one of"):
        register_stage("other", f"{__name__}:TopNSigma", before="race")
