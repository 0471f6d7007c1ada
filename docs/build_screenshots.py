"""Makes the pictures of the documentation: `python docs/build_screenshots.py [NAME ...]`.

It writes small models and logs into a temporary directory, makes pages of them with the commands, and opens the pages in Chromium.
It needs Chromium, the extras `test` and `serve`, and pillow, which reduces the pictures to 128 colours.
"""

import io
import json
import math
import random
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch
from PIL import Image
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_lite.commands import plot  # noqa: E402
from tests.browsers import PHONE, Page, page  # noqa: E402
from tests.models import write_llama  # noqa: E402
from tests.runs import run  # noqa: E402
from tests.trainer.inference.conversations import save  # noqa: E402
from tests.trainer.inference.serving import KEY, Serving  # noqa: E402

IMAGES = ROOT / "docs" / "images"
MOST_BYTES = 150_000
WIDTH = 960
COLOURS = 128
LLAMA_7B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", "vocab_size": 32000, "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 30, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
MOVED = {"q": 0.02, "v": 0.05, "gate": 0.01, "up": 0.01, "down": 0.008}
"""Matrices that the finetuned model changes, and how far they move in relation to their deviation."""
CONVERSATION = [
    {"role": "user", "content": "What is a checkpoint?"},
    {"role": "assistant", "content": "A model at rest. Its tensors have names, shapes and values."},
    {"role": "user", "content": "And a training run?"},
    {"role": "assistant", "content": "A model in motion: each step changes every tensor a little."},
]


def keep(tab: Page, name: str, *, first: str = "body", last: str = "body") -> None:
    """Keep the page from the top of one element to the end of another one."""
    top, bottom = (
        tab.run(f"(box => [box.top + scrollY, box.bottom + scrollY])(document.querySelector({each!r}).getBoundingClientRect())")
        for each in (first, last)
    )  # fmt: skip
    tab.resize(WIDTH, math.ceil(bottom[1]) + 16)
    time.sleep(0.3)  # the browser draws after it has laid out the page anew
    write(name, tab.picture(), max(0, int(top[0]) - 16))


def write(name: str, picture: bytes, top: int = 0) -> None:
    """Write a picture with few colours. Exit if it is large."""
    image = Image.open(io.BytesIO(picture)).convert("RGB")
    image = image.crop((0, top, image.width, image.height))
    target = IMAGES / f"{name}.png"
    image.quantize(COLOURS).save(target, optimize=True)
    size = target.stat().st_size
    print(f"{target.relative_to(ROOT)}: {image.width} x {image.height}, {size:,} bytes")
    if size > MOST_BYTES:
        sys.exit(f"{target}: is larger than {MOST_BYTES:,} bytes")


def opened(tab: Page, path: Path, scheme: str = "light") -> None:
    tab.resize(WIDTH, 900)
    tab.prefer(scheme)
    tab.open(path.as_uri())
    tab.run("document.documentElement.style.scrollbarWidth = 'none'")


def inspect_and_diff(tab: Page, directory: Path) -> None:
    base = write_llama(directory / "base", layers=12, hidden=64, ffn=176, vocab=600, dtype="float32")  # fmt: skip
    tuned = shutil.copytree(base, directory / "tuned")
    torch.manual_seed(0)
    weights = load_file(base / "model.safetensors")
    changed = {name: finetuned(name, tensor) for name, tensor in weights.items()}
    save_file(changed, tuned / "model.safetensors", {"format": "pt"})
    sizes = ("--tp", 2, "--pp", 4, "--vpp", 3)
    run("convert", base, directory / "checkpoint", "--saver", "core", *sizes)
    run("inspect", directory / "checkpoint", "--stats", "--html", directory / "inspect.html")
    opened(tab, directory / "inspect.html")
    keep(tab, "inspect", first="#map-part", last="#layout-part")
    opened(tab, directory / "inspect.html", "dark")
    keep(tab, "histograms", first="#plot-part", last="#histogram-part")
    run("diff", base, tuned, "--html", directory / "diff.html")
    opened(tab, directory / "diff.html")
    tab.run("document.querySelectorAll('#modules button')[2].click()")
    keep(tab, "diff", first="#module-part", last="#heat-part")


def finetuned(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as a finetuning leaves it: later layers move farther, the first two stay."""
    found = re.search(r"layers\.(\d+)\..*?(\w+)_proj", name)
    if not found or found[2] not in MOVED or int(found[1]) < 2:
        return tensor
    amount = MOVED[found[2]] * (0.2 + (int(found[1]) / 11) ** 2)
    return tensor + tensor.std() * torch.randn_like(tensor) * amount


def plan(tab: Page, directory: Path) -> None:
    model = directory / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(LLAMA_7B))
    sizes = (
        "--gpus",
        32,
        "--seq-length",
        4096,
        "--global-batch-size",
        64,
        "--pp",
        4,
        "--vpp",
        2,
        "--top",
        5,
    )
    run("plan", model, *sizes, "--html", directory / "plan.html")
    opened(tab, directory / "plan.html")
    tab.run("document.querySelectorAll('h2')[1].id = 'from'")
    tab.run("document.querySelector('h2:last-of-type').previousElementSibling.id = 'to'")
    keep(tab, "plan", first="#from", last="#to")


def curves(tab: Page, directory: Path) -> None:
    random.seed(1)
    words = []
    for name, rate in (("lr 3e-4", 3e-4), ("lr 1e-3", 1e-3), ("lr 3e-3", 3e-3)):
        log = directory / f"{rate:g}.jsonl"
        log.write_text("".join(json.dumps(line) + "\n" for line in steps(rate)))
        words.append(f"{name}={log}")
    plot.main([*words, "--html", str(directory / "curves.html")])
    opened(tab, directory / "curves.html")
    tab.run("document.querySelectorAll('.legend')[1].id = 'to'")
    keep(tab, "curves", last="#to")


def steps(rate: float) -> list[dict[str, float]]:
    """Return the lines of a metrics file, as a run with this learning rate could write them."""
    lines: list[dict[str, float]] = []
    for step in range(10, 1210, 10):
        loss = 1.6 + 6.3 * math.exp(-step * rate * 3.1) + random.gauss(0, 0.03)
        decay = min(1, step / 100) * (0.55 + 0.45 * math.cos(math.pi * step / 1210))
        speed = random.gauss(5100, 40)
        lines.append({"iteration": step, "loss": loss, "learning_rate": rate * decay, "tokens_per_second": speed})  # fmt: skip
        if step % 200 == 0:
            lines.append({"iteration": step, "validation_loss": loss + 0.05})
    return lines


def chat(tab: Page, directory: Path) -> None:
    """A tiny model that has learned one conversation by heart answers in it."""
    directory = directory / "tiny-chat"
    model = save(directory, max_position_embeddings=512)
    learn(model, directory)
    serving = Serving(directory)
    tab.resize(WIDTH, 680)
    tab.prefer("light")
    tab.open(serving.url)
    tab.run(
        f"document.getElementById('key').value = {KEY!r}; document.getElementById('key').onchange()"
    )
    tab.wait("document.getElementById('error').hidden && document.getElementById('model').value")
    tab.run("document.getElementById('temperature').value = '0'")
    for turn in CONVERSATION[::2]:
        tab.run(
            f"document.getElementById('prompt').value = {turn['content']!r}; document.getElementById('send').click()"
        )
        tab.wait("!document.getElementById('again').hidden")
    write("chat", tab.picture())
    tab.resize(*PHONE)
    tab.prefer("dark")
    tab.run("for (const each of document.querySelectorAll('details')) each.open = false")
    time.sleep(0.3)
    write("chat-phone", tab.picture())
    serving.end()


def learn(model: torch.nn.Module, directory: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    found = tokenizer.apply_chat_template(CONVERSATION, return_tensors="pt", return_dict=True)
    ids = found["input_ids"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(400):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"the model of the chat has learned its conversation: loss {loss.item():.4f}")
    model.save_pretrained(directory)


def main(wanted: list[str]) -> None:
    IMAGES.mkdir(exist_ok=True)
    for each in (inspect_and_diff, plan, curves, chat):
        if wanted and each.__name__ not in wanted:
            continue
        # The browser may still write into its profile when it ends.
        place = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        with place as name, page(Path(name, "browser")) as tab:
            each(tab, Path(name))


if __name__ == "__main__":
    main(sys.argv[1:])
