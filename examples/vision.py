"""Images in front of the engine: a SmolVLM whose language model nanoserve serves.

    python examples/vision.py                          a tiny random model, no download
    python examples/vision.py FOLDER IMAGE QUESTION    a SmolVLM or Idefics 3 (needs pillow)

Such a model has three parts. A vision transformer turns an image into one vector for each patch; a
*connector* merges each square of patches into one vector as wide as the language model; and the
language model reads these in place of token embeddings, at *placeholder* ids of the prompt:

    pixels --tower--> [patches, width] --connector--> [rows, hidden_size] --+
    text --tokenizer--> [ 5 | image | image | image | 7 ] ------------------+--> nanoserve

Tower and connector are transformers' own, and run once for each image. The engine gets their rows
as `prompt_embeds_pieces`, and needs to know nothing about images. It hashes the rows, so a second
question about an image finds the KV blocks of the first one.

Without arguments the script makes a random model of this shape, asks two questions about each of
two random images, and compares the tokens with those of transformers' whole model.
"""

import hashlib
import sys
import tempfile
import time
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)
from transformers.utils import logging

from nanoserve import LLM, SamplingParams

MOST_IMAGES = 64  # whose rows are kept: 64 rows of 576 float32 numbers take 147 kB


class VisionTower:
    """The vision transformer and the connector of a checkpoint, without its language model.

    The rows of the last `MOST_IMAGES` images are kept: an image that is asked about again is not
    encoded again.
    """

    def __init__(self, folder: str) -> None:
        whole = AutoModelForImageTextToText.from_pretrained(folder).eval()
        self.image_token_id = whole.config.image_token_id
        self._model = whole.model
        self._model.text_model = None  # the engine loads it
        self._rows: OrderedDict[bytes, Tensor] = OrderedDict()
        self.num_encoded = 0

    @torch.inference_mode()
    def rows(self, pixels: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the rows of images, [num_images x rows of an image, hidden_size].

        pixels: [num_images, 3, height, width], normalised. mask: bool [num_images, height, width],
        False where an image was padded; None if none was.
        """
        parts = [] if mask is None else [mask.numpy().tobytes()]
        key = hashlib.sha256(b"".join([pixels.numpy().tobytes(), *parts])).digest()
        if key not in self._rows:
            own_mask = None if mask is None else mask[None]
            (rows,) = self._model.get_image_features(pixels[None], own_mask).pooler_output
            self._rows[key] = rows.clone()
            self.num_encoded += 1
        self._rows.move_to_end(key)
        if len(self._rows) > MOST_IMAGES:
            self._rows.popitem(last=False)
        return self._rows[key]

    def prompt(
        self, token_ids: list[int], pixels: Tensor, mask: Tensor | None = None
    ) -> dict[str, Any]:
        """Return a prompt of the engine: rows take the place of the placeholders, in order.

        Raises `ValueError` if there are more or fewer placeholders than rows.
        """
        rows, pieces, used = self.rows(pixels, mask), [], 0
        for start, length in runs(token_ids, self.image_token_id):
            pieces.append((start, rows[used : used + length]))
            used += length
        if used != len(rows):
            raise ValueError(f"the prompt has {used} placeholders, the images {len(rows)} rows")
        return {"prompt_token_ids": token_ids, "prompt_embeds_pieces": pieces}


def runs(token_ids: list[int], wanted: int) -> list[tuple[int, int]]:
    """Return (start, length) of each run of the id `wanted`."""
    found: list[tuple[int, int]] = []
    for position, token_id in enumerate(token_ids):
        if token_id != wanted:
            continue
        if found and sum(found[-1]) == position:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((position, 1))
    return found


def serve(folder: str, **options: Any) -> LLM:
    """Return an engine with the language model of the checkpoint: its text part."""
    return LLM(folder, enable_prompt_embeds=True, **options)


# ------------------------------------------------------------------ a tiny random model


def make_tiny(folder: str) -> SmolVLMForConditionalGeneration:
    """Write a random SmolVLM: 32 x 32 pixels in patches of 8 x 8, four of which make a row."""
    torch.manual_seed(0)
    vision = {"hidden_size": 32, "image_size": 32, "patch_size": 8, "num_hidden_layers": 2}
    vision |= {"num_attention_heads": 2, "intermediate_size": 64}
    text = {"model_type": "llama", "vocab_size": 300, "hidden_size": 48, "intermediate_size": 80}
    text |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    text |= {"max_position_embeddings": 512, "pad_token_id": 0, "eos_token_id": None}
    config = SmolVLMConfig(
        vision_config=vision,
        text_config=text,
        scale_factor=2,
        image_token_id=299,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    model = SmolVLMForConditionalGeneration(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" not in name:  # larger than a fresh model's, whose logits nearly tie
            torch.nn.init.normal_(parameter, std=0.2)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    return model


@torch.inference_mode()
def ask_transformers(
    model: SmolVLMForConditionalGeneration, token_ids: list[int], pixels: Tensor, max_tokens: int
) -> list[int]:
    """Return what the whole model generates."""
    ids = torch.tensor([token_ids])
    found = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        pixel_values=pixels[None],
        max_new_tokens=max_tokens,
        min_new_tokens=max_tokens,
        do_sample=False,
    )
    return found[0, len(token_ids) :].tolist()


def compare_tiny(max_tokens: int = 12, **options: Any) -> int:
    """Print both models' tokens for two questions about each of two images.

    Returns the number of differences.
    """
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    with tempfile.TemporaryDirectory() as folder:
        whole = make_tiny(folder)
        tower = VisionTower(folder)
        image, num_rows = [tower.image_token_id], 4
        questions = ([21, 22, 23], [31, 32, 33, 34])
        num_wrong = 0
        sizes = {"skip_tokenizer_init": True, "block_size": 4, "num_kv_blocks": 200}
        with serve(folder, dtype="float32", **{**sizes, **options}) as llm:
            for number in range(2):
                # Two views of one image, as the real models cut large ones into squares.
                pixels = torch.randn(2, 3, 32, 32)
                view = [7, *image * num_rows, 8]
                for question in questions:
                    token_ids = [1, 2, 3, *view, *view, *question]
                    prompt = tower.prompt(token_ids, pixels)
                    (output,) = llm.generate(prompt, params, use_tqdm=False)
                    tokens = list(output.outputs[0].token_ids)
                    expected = ask_transformers(whole, token_ids, pixels, max_tokens)
                    num_wrong += tokens != expected
                    print(f"image {number}, question {question}")
                    print(f"  nanoserve     {tokens}, {output.num_cached_tokens} tokens cached")
                    print(f"  transformers  {expected}")
        print(f"{tower.num_encoded} images encoded, {num_wrong} answers differ")
    return num_wrong


# ------------------------------------------------------------------ a real model


def ask(folder: str, file: str, question: str) -> None:
    """Print the answer of a downloaded model to a question about an image."""
    from PIL import Image

    processor = AutoProcessor.from_pretrained(folder)
    content = [{"type": "image"}, {"type": "text", "text": question}]
    text = processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True
    )
    # The processor cuts the image into squares, and writes placeholders for the rows of each.
    inputs = processor(text=text, images=[Image.open(file).convert("RGB")], return_tensors="pt")
    tower = VisionTower(folder)
    start = time.perf_counter()
    mask = inputs["pixel_attention_mask"][0].bool()
    prompt = tower.prompt(inputs["input_ids"][0].tolist(), inputs["pixel_values"][0], mask)
    num_tokens, seconds = len(prompt["prompt_token_ids"]), time.perf_counter() - start
    print(f"{num_tokens} tokens of prompt; the images took {seconds:.1f} s")
    with serve(folder) as llm:
        (output,) = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=200))
        print(output.outputs[0].text)


if __name__ == "__main__":
    logging.disable_progress_bar()
    if len(sys.argv) == 4:
        ask(*sys.argv[1:])
    elif len(sys.argv) == 1:
        sys.exit(compare_tiny() > 0)
    else:
        sys.exit(__doc__)
