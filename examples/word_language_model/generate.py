"""Write words with a model that main.py has saved."""

import argparse
import textwrap
from collections.abc import Sequence

import checkpoint
import data
import torch
from model import Model, with_options


@torch.no_grad()
def draw(
    model: Model, vocabulary: list[str], count: int, temperature: float, device: torch.device
) -> list[str]:
    """Draw words one after the other, each after those before it; ``<unk>`` is not among them."""
    model.eval()
    model.rnn.reset_hidden(1)
    word, found = torch.full((1, 1), data.END, device=device), []
    for _ in range(count):
        scores = model(word)[0, 0, : len(vocabulary)] / temperature
        scores[data.UNKNOWN] = -torch.inf
        word = torch.multinomial(scores.softmax(0), 1).reshape(1, 1)
        found.append(vocabulary[int(word)])
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Print paragraphs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", default="model.pt", metavar="FILE")
    parser.add_argument("--words", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=1.0, help="lower: likelier words")
    parser.add_argument("--seed", type=int, default=1111)
    args = parser.parse_args(argv)
    # Scores divided by less than 1e-30 can be beyond float32.
    if args.words < 1 or not args.temperature >= 1e-30 or not 0 <= args.seed < 2**32:
        parser.error("pass --words of 1 or more, --temperature above 0, --seed 0 to 2**32 - 1")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    saved = checkpoint.load(args.checkpoint)
    model = with_options(saved["options"], len(saved["vocabulary"])).to(device)
    model.load_state_dict(saved["model"])  # float32, whatever it was trained in
    torch.manual_seed(args.seed)
    words = draw(model, saved["vocabulary"], args.words, args.temperature, device)
    for paragraph in " ".join(words).split("<eos>"):
        print(textwrap.fill(paragraph.strip(), 80))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit("stopped") from None
