"""transformers in float32 as the judge of greedy answers: how far each chosen token was from the best one."""

import torch
from transformers_peer import TransformersPeer


class Oracle(TransformersPeer):
    @torch.inference_mode()
    def gaps(self, prompt: list[int], outputs: list[list[int]]) -> list[list[float]]:
        """Best logit minus the chosen token's, for every token of every output, each output being its own past."""
        first = self.model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
        chosen = torch.tensor(outputs)
        cache = first.past_key_values
        cache.batch_repeat_interleave(len(outputs))
        rest = self.model(chosen[:, :-1], past_key_values=cache).logits
        logits = torch.cat([first.logits.expand(len(outputs), -1, -1), rest], dim=1)
        taken = logits.gather(2, chosen[..., None])[..., 0]
        gaps: list[list[float]] = (logits.amax(dim=2) - taken).tolist()
        return gaps
