"""Speculative decoding: propose draft tokens, compute them in one step, keep the accepted ones.

A step that computes one token of a sequence reads every weight for it; a few tokens more take
little longer. So a proposer says what may come next, the row of the sequence ends with its draft
tokens, and the model's logits behind each of them say whether the next one is accepted.

**The sampler is the verifier.** A token is a pure function of its logits, its request's settings
and the noise of (seed, position, completion). So each position is sampled as ever, and a draft
token is accepted if it is what the sampler draws there: not more, and not less. The output is what
it would have been without draft tokens, token for token, greedy or at random, with any proposer.
The K and V of a rejected one lie behind what counts as computed, and are overwritten before they
are read.

`config`: the options. `proposer`: the seam; `ngram`, `suffix`, `draft_model`, `head_proposer`: its
implementations, by name in `methods`. `goodput`: how many draft tokens pay, by `step_costs`.
`extension`: what adds them to the engine's steps.
"""
