"""Speculative decoding: propose draft tokens, compute them in one step, keep the accepted ones.

A step that computes one token of a sequence reads every weight for it; a few more tokens take
little longer. So a proposer suggests the next tokens, these draft tokens are appended to the row
of the sequence, and the model's logits after each of them decide whether the next one is accepted.

**The sampler is the verifier.** A token is a pure function of its logits, its request's settings
and the noise of (seed, position, completion). So each position is sampled as usual, and a draft
token is accepted if and only if the sampler draws the same token there. The output is the same as
without draft tokens, token for token, greedy or sampled, with any proposer. The K and V of a
rejected draft token lie after the last position that counts as computed, and are overwritten
before they are read.

`config`: the options, and the registry of methods. `proposer`: the interface; `ngram`, `suffix`,
`draft_model`, `head_proposer`: its implementations. `goodput`: chooses how many draft tokens to
verify, from the times in `step_costs`. `extension`: adds draft tokens to the engine's steps.
"""
