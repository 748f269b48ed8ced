"""Draw the diagrams of the documentation that show an idea, as SVG.

``python docs/images/draw.py`` writes them beside this file. Those that show a configuration are drawn by
``check CONFIG --picture``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
BLUE, LIGHT_BLUE, GREEN, PURPLE = "#2563a8", "#3b7cc4", "#2f7d4f", "#6b4fa0"
ORANGE, GREY, EMPTY, INK, PALE = "#a15c07", "#64748b", "#e5e7eb", "#1f2937", "#4b5563"
WHITE = "#ffffff"
MASKS = {"0": EMPTY, "1": BLUE}
"""Colour of a token by its mask."""


class Picture:
    """SVG picture on white, of 720 units of width, with a title and a description for screen readers."""

    def __init__(self, title: str, description: str, height: int) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 {height}" width="720" '
            f'height="{height}" role="img" font-family="system-ui, sans-serif" font-size="13">',
            f"<title>{escape(title)}</title>",
            f"<desc>{escape(description)}</desc>",
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
            f'orient="auto"><path d="M0 0L8 4L0 8z" fill="{INK}"/></marker></defs>',
            f'<rect width="720" height="{height}" rx="6" fill="{WHITE}"/>',
        ]

    def text(self, x: float, y: float, text: str, *, size: int = 13, color: str = INK, anchor: str = "start",
             bold: bool = False) -> None:  # fmt: skip
        """Write one line; ``anchor`` is start, middle or end."""
        weight = ""
        if bold:
            weight = ' font-weight="bold"'
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" fill="{color}" font-size="{size}" text-anchor="{anchor}"{weight}>'
            f"{escape(text)}</text>"
        )

    def box(self, x: float, y: float, width: float, height: float, color: str, *lines: str,
            size: int = 12) -> None:  # fmt: skip
        """Draw a filled box with centred lines in it."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" fill="{color}"/>'
        )
        ink = WHITE
        if color == EMPTY:
            ink = INK
        first = y + height / 2 + size * 0.35 - (len(lines) - 1) * size * 0.62
        for index, line in enumerate(lines):
            self.text(x + width / 2, first + index * size * 1.24, line, size=size, color=ink, anchor="middle")

    def note(self, y: float, text: str) -> None:
        """Write one line of explanation below the drawing."""
        self.text(16, y, text, size=12, color=PALE)

    def frame(self, x: float, y: float, width: float, height: float) -> None:
        """Draw a border without a filling."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5" fill="none" '
            'stroke="#9ca3af"/>'
        )

    def arrow(self, x1: float, y1: float, x2: float, y2: float, *, dashed: bool = False) -> None:
        """Draw a line with a head at its end."""
        dashes = ""
        if dashed:
            dashes = ' stroke-dasharray="5 3"'
        self.parts.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{INK}" stroke-width="1.5"'
            f'{dashes} marker-end="url(#head)"/>'
        )

    def svg(self) -> str:
        """Return the file's content."""
        return "\n".join([*self.parts, "</svg>\n"])


def step_with_roles() -> str:
    """Draw one step of PPO in time, a row for each role."""
    picture = Picture(
        "One training step in time, by role",
        "The actor sends its weights to the rollout, which samples. The reward model "
        "computes rewards. Actor, "
        "critic and reference score together. Advantages are computed. Critic and actor "
        "take optimizer steps.",
        300,
    )
    phases = (("sync", 116, 58), ("generate", 176, 178), ("reward", 356, 76), ("score", 434, 88),
              ("estimate", 524, 62), ("learn", 588, 116))  # fmt: skip
    for name, x, width in phases:
        picture.text(x + width / 2, 24, name, size=12, color=PALE, anchor="middle")

    rows = {
        "rollout": {"sync": (PURPLE, "receives"), "generate": (GREEN, "samples responses")},
        "reward model": {"reward": (ORANGE, "rewards")},
        "reference": {"score": (GREY, "log-probs")},
        "critic": {"score": (GREY, "values"), "learn": (BLUE, "optimizer")},
        "actor": {"sync": (PURPLE, "sends"), "score": (GREY, "log-probs"), "learn": (BLUE, "optimizer")},
    }
    for index, (role, bars) in enumerate(rows.items()):
        y = 36 + index * 42
        picture.text(16, y + 22, role)
        for name, x, width in phases:
            if name == "estimate":
                continue
            color, label = bars.get(name, ("#f3f4f6", ""))
            picture.box(x, y, width, 34, color, *filter(None, [label]), size=11)
    picture.box(524, 36, 62, 202, BLUE, "all ranks:", "advan-", "tages", size=11)
    picture.note(
        268,
        "Roles on ranks of their own work at the same time; roles on the same ranks, one after the other.",
    )
    picture.note(286, "GRPO has neither critic nor reward model. Lengths of the bars are examples.")
    return picture.svg()


def nodes() -> str:
    """Draw the roles of a job on two nodes of four GPUs."""
    picture = Picture(
        "Roles and ranks by node",
        "One torchrun job on two nodes of four ranks. The actor is on ranks 0 to 3 with "
        "tensor 2 and pipeline 2, "
        "the critic on 4 and 5, the reference on 6 and 7; the rollout has a replica of "
        "two ranks four times.",
        250,
    )
    for node in range(2):
        left = 96 + node * 310
        picture.frame(left, 14, 302, 190)
        picture.text(left + 10, 32, f"node {node}", bold=True)
        for slot in range(4):
            picture.text(
                left + 46 + slot * 72, 52, f"rank {node * 4 + slot}", size=11, color=PALE, anchor="middle"
            )

    def cell(rank: int, row: int, color: str, label: str) -> None:
        """Fill the cell of one rank and role."""
        picture.box(96 + rank // 4 * 310 + 12 + rank % 4 * 72, 60 + row * 35, 68, 29, color, label, size=11)

    for row, role in enumerate(("actor", "critic", "reference", "rollout")):
        picture.text(16, 79 + row * 35, role)
    for rank in range(4):
        cell(rank, 0, BLUE, f"p{rank // 2} t{rank % 2}")
    for rank in (4, 5):
        cell(rank, 1, PURPLE, f"t{rank - 4}")
    for rank in (6, 7):
        cell(rank, 2, GREY, f"d{rank - 6}")
    for rank in range(8):
        cell(rank, 3, GREEN, f"r{rank // 2} t{rank % 2}")
    picture.note(
        224, "t: tensor-parallel index, p: pipeline stage, d: data-parallel index, r: replica of the engine."
    )
    picture.note(241, "A tensor-parallel group stays inside a node; every rank runs the same program.")
    return picture.svg()


def weight_sync() -> str:
    """Draw which rank sends which rows of a weight to which rank, with the bytes."""
    picture = Picture(
        "Which rank sends which rows of a weight to which rank",
        "The actor has tensor 2 and the rollout tensor 4. Each rank of the rollout needs "
        "a quarter of the rows. "
        "Ranks 0 and 1 copy it inside the rank and receive nothing; ranks 2 and 3 receive 8.4 MB each.",
        340,
    )
    picture.text(16, 26, "actor, tensor: 2", bold=True)
    picture.note(44, "boxes that ranks hold")
    picture.text(500, 26, "rollout, tensor: 4", bold=True)
    picture.text(500, 44, "boxes that ranks need", size=12, color=PALE)
    for index, color in enumerate((BLUE, LIGHT_BLUE)):
        first = index * 2048
        y = 60 + index * 124
        picture.box(
            16, y, 180, 104, color, f"rank {index}", f"rows {first}-{first + 2047}", "16.8 MB", size=13
        )
        picture.box(500, y, 204, 46, GREEN, f"rank {index}: rows {first}-{first + 1023}", "receives 0 B")
        picture.box(500, y + 58, 204, 46, GREEN, f"rank {index + 2}: rows {first + 1024}-{first + 2047}",
                    "receives 8.4 MB")  # fmt: skip
        picture.text(348, y + 15, "copy inside the rank", size=12, anchor="middle")
        picture.arrow(202, y + 23, 494, y + 23, dashed=True)
        picture.text(348, y + 73, f"rank {index} sends 8.4 MB to rank {index + 2}", size=12, anchor="middle")
        picture.arrow(202, y + 81, 494, y + 81)
    picture.note(
        316, "A weight of 4096 x 4096 in bfloat16: 33.6 MB. A sync of whole tensors would send it to all four"
    )
    picture.note(332, "ranks, 134 MB; the boxes that are missing are 16.8 MB.")
    return picture.svg()


def batches() -> str:
    """Draw the way of ragged rows to the micro-batches of two data-parallel ranks."""
    picture = Picture(
        "Ragged rows to micro-batches",
        "Two prompts with two samples each give four rows of 5, 9, 4 and 6 tokens. "
        "Data-parallel rank 0 gets the "
        "rows of 9 and 4, rank 1 those of 5 and 6; each packs its rows into "
        "micro-batches of at most 12 tokens.",
        304,
    )
    unit = 17
    rows = (("p0/0", 5, BLUE), ("p0/1", 9, LIGHT_BLUE), ("p1/0", 4, GREEN), ("p1/1", 6, PURPLE))
    picture.text(16, 26, "rows", bold=True)
    picture.text(130, 26, "P = 2 prompts, G = 2 samples each: B = 4 rows, N = 24 tokens", size=12, color=PALE)
    for index, (name, tokens, color) in enumerate(rows):
        picture.box(130, 36 + index * 24, tokens * unit, 20, color, f"{name}: {tokens}", size=11)

    picture.text(16, 158, "one tensor [N]", bold=True)
    x = 130.0
    for name, tokens, color in rows:
        picture.box(x, 142, tokens * unit - 2, 24, color, name, size=11)
        x += tokens * unit
    picture.text(x + 10, 158, "no padding", size=12, color=PALE)

    picture.arrow(230, 172, 230, 190)
    picture.arrow(420, 172, 420, 190)
    picture.text(246, 186, "balanced by work", size=12, color=PALE)
    for rank, parts in enumerate((((rows[1],), (rows[2],)), ((rows[0], rows[3]),))):
        y = 196 + rank * 42
        picture.text(16, y + 20, f"data rank {rank}", bold=True)
        x = 130.0
        for number, micro in enumerate(parts):
            width = 12 * unit
            picture.frame(x, y, width + 8, 34)
            position = x + 4
            for name, tokens, color in micro:
                picture.box(position, y + 5, tokens * unit - 2, 24, color, name, size=11)
                position += tokens * unit
            picture.text(x + width + 2, y + 21, f"#{number}", size=10, color=PALE, anchor="end")
            x += width + 20
    picture.note(294, "A frame is a micro-batch of at most batch.tokens_per_microbatch (here 12) tokens.")
    return picture.svg()


def conversation() -> str:
    """Draw the tokens of a conversation in one row, with the mask of the loss."""
    picture = Picture(
        "A conversation's row and its mask",
        "Prompt, first turn, observation and second turn are one row of tokens. The loss "
        "counts the tokens of the "
        "two turns, which the policy sampled; prompt and observation have mask 0.",
        190,
    )
    parts = (
        ("prompt", "12*7=", 5, GREY, "0", "-", "-"),
        ("turn 1", "12*7= <eos>", 6, BLUE, "1", "of the engine", "version 7"),
        ("observed", "84,", 3, ORANGE, "0", "-", "-"),
        ("turn 2", "84 <eos>", 3, BLUE, "1", "of the engine", "version 8"),
    )
    labels = ("", "tokens", "mask", "log-probs", "sampled by")
    for index, label in enumerate(labels):
        picture.text(16, 26 + index * 32, label)
    unit = 35
    x = 104.0
    for name, tokens, count, color, mask, log_probs, version in parts:
        width = count * unit
        picture.text(x + width / 2, 26, name, bold=True, anchor="middle")
        picture.box(x, 38, width - 3, 28, color, tokens, size=12)
        for slot in range(count):
            picture.box(x + slot * unit, 72, unit - 3, 24, MASKS[mask], mask, size=11)
        picture.text(x + width / 2, 122, log_probs, size=12, color=PALE, anchor="middle")
        picture.text(x + width / 2, 154, version, size=12, color=PALE, anchor="middle")
        x += width
    picture.note(182, "New weights arrived between the turns (rollout.partial). Nothing is tokenised again.")
    return picture.svg()


def your_code() -> str:
    """Draw the places of a step where a user's code runs."""
    picture = Picture(
        "Where your code plugs in",
        "Your code can drive an episode, filter responses, compute rewards, be a piece "
        "of the algorithm, provide "
        "the model, watch each step, or replace the step by a script.",
        262,
    )
    stages: Sequence[tuple[str, str, Sequence[str], str]] = (
        ("prompts", GREY, ("data.train", "data.sources"), "your files"),
        ("generate", GREEN, ("rollout", ".environment", "rollout.filters"), "contained"),
        ("reward", ORANGE, ("reward.function", "reward.http", "reward.judge"), "contained"),
        ("estimate", PURPLE, ("algorithm", ".advantage", "algorithm.kl"), "on every rank"),
        ("learn", BLUE, ("algorithm", ".policy_loss", "model.provider"), "on every rank"),
    )
    for index, (name, color, keys, runs) in enumerate(stages):
        x = 16 + index * 141
        picture.box(x, 16, 124, 34, color, name, size=13)
        if index < len(stages) - 1:
            picture.arrow(x + 125, 33, x + 140, 33)
        picture.arrow(x + 62, 78, x + 62, 54)
        picture.frame(x, 80, 124, 84)
        for line, key in enumerate(keys):
            picture.text(x + 62, 100 + line * 17, key, size=12, anchor="middle")
        picture.text(x + 62, 156, runs, size=11, color=PALE, anchor="middle")
    picture.box(
        16, 178, 688, 28, EMPTY, "callbacks: your classes, called before and after each step, on rank 0"
    )
    picture.box(16, 212, 688, 28, EMPTY, "megatron_rl.Run: your script in place of the step")
    picture.note(256, "Contained code runs in processes of its own, without network unless you allow it.")
    return picture.svg()


def run_files() -> str:
    """Draw the files of a run by what writes them, and the command that reads them."""
    picture = Picture(
        "Files of a run",
        "At its start a run writes its configuration and code. Each step writes metrics "
        "and samples, each "
        "evaluation its answers, each checkpoint its state, and the end the report, the "
        "curve and the model.",
        262,
    )
    columns: Sequence[tuple[str, str, Sequence[str]]] = (
        ("start", GREY, ("config.yaml", "code/", "tokens/", "rank_logs/")),
        ("each step", GREEN, ("metrics.jsonl", "rollouts/", "step_N.parquet", "tensorboard/")),
        ("each evaluation", ORANGE, ("rollouts/", "eval_SET_N.parquet")),
        ("each checkpoint", PURPLE, ("checkpoints/", "step_N/")),
        ("end", BLUE, ("report.html", "learning_curve.png", "hf/")),
    )
    readers = ("check", "report, compare", "report", "resume, eval, export", "a browser, serve")
    for index, (name, color, files) in enumerate(columns):
        x = 16 + index * 141
        picture.box(x, 16, 124, 34, color, name, size=13)
        picture.frame(x, 56, 124, 92)
        for line, file in enumerate(files):
            picture.text(x + 62, 78 + line * 19, file, size=12, anchor="middle")
        picture.arrow(x + 62, 150, x + 62, 178)
        picture.box(x, 182, 124, 30, EMPTY, readers[index], size=11)
    picture.note(
        236,
        "Below: what reads them. All is in run_dir; a run that is started again continues from its",
    )
    picture.note(252, "newest checkpoint.")
    return picture.svg()


def sampling_order() -> str:
    """Draw which of five groups the closed and the open order train on, in two steps of two groups."""
    picture = Picture(
        "Which groups a step takes, in the closed and in the open order",
        "Two prompts a step. In the closed order step 1 waits for its slow group, and step 2 "
        "samples its own prompts. In the open order step 1 takes the two groups that are complete "
        "first; the slow group continues and is trained on in step 2.",
        276,
    )
    orders = (
        ("closed", (("group 0", 96, 130), ("group 1, slow", 96, 290), ("group 2", 392, 150),
                    ("group 3", 392, 110)), (388, 704)),
        ("open", (("group 0", 96, 130), ("group 1, slow", 96, 290), ("group 2", 96, 190),
                  ("group 3", 292, 110)), (290, 560)),
    )  # fmt: skip
    # Step in which each group is trained on: blue in the first one, green in the second.
    colors = {"closed": (BLUE, BLUE, GREEN, GREEN), "open": (BLUE, GREEN, BLUE, GREEN)}
    for index, (order, bars, _) in enumerate(orders):
        top = 14 + index * 122
        picture.text(16, top + 14, order, bold=True)
        for row, ((name, x, width), color) in enumerate(zip(bars, colors[order], strict=True)):
            picture.box(x, top + row * 25, width, 21, color, name, size=11)
    for index, (_, _, (first, second)) in enumerate(orders):
        top = 14 + index * 122
        picture.text(first + 4, top + 110, "learn 1", size=11, color=PALE, anchor="end")
        picture.text(second, top + 110, "learn 2", size=11, color=PALE, anchor="end")
    picture.note(268, "Blue groups are trained on in step 1, green ones in step 2. Time runs to the right.")
    return picture.svg()


def stages() -> str:
    """Draw the stages before the first step, with the file that each one writes."""
    picture = Picture(
        "Stages before the first step",
        "Supervised training starts from model.path, training on preferences from its result. "
        "Reward models are trained from the policy. Then the steps of reinforcement learning follow.",
        176,
    )
    parts = (
        ("model.path", GREY, "where it starts", ""),
        ("sft", BLUE, "given responses", "stages/sft"),
        ("preference", BLUE, "pairs: DPO", "stages/preference"),
        ("reward.models", ORANGE, "pairs", "reward_models/NAME"),
        ("steps", GREEN, "rewards", "checkpoints, hf"),
    )
    for index, (name, color, learns_from, written) in enumerate(parts):
        x = 16 + index * 141
        picture.box(x, 16, 124, 34, color, name, size=13)
        if index < len(parts) - 1:
            picture.arrow(x + 125, 33, x + 140, 33)
        picture.text(x + 62, 72, learns_from, size=12, color=PALE, anchor="middle")
        if written:
            picture.arrow(x + 62, 80, x + 62, 98)
            picture.box(x, 102, 124, 28, EMPTY, written, size=11)
    picture.note(152, "Each stage is optional, has checkpoints of its own, and resumes where it was killed.")
    picture.note(169, "With `sft`, `prefer` or `reward-model` in place of `train` it is a job of its own.")
    return picture.svg()


def layers() -> str:
    """Draw the layers of the package, of which each imports only those below it."""
    picture = Picture(
        "Layers of the package",
        "Commands and planning are above the trainer, which is above the roles. Below these are engine "
        "and rollout, then checkpoints and models, then weights and groups, then values without torch.",
        262,
    )
    rows = (
        ("commands, predictions", GREY, ("cli", "planning")),
        ("a job", BLUE, ("trainer", "roles")),
        ("sampling", GREEN, ("hybrid_engine", "rollout")),
        ("models", PURPLE, ("checkpoint", "hf", "megatron")),
        ("ranks", ORANGE, ("weights", "distributed")),
        ("subjects", LIGHT_BLUE, ("check", "environments", "algorithms", "data", "rewards")),
        ("values", GREY, ("config", "interop", "shapes", "types", "contained")),
    )
    for index, (label, color, names) in enumerate(rows):
        y = 12 + index * 32
        picture.text(16, y + 18, label)
        width = 530 / len(names)
        for slot, name in enumerate(names):
            picture.box(174 + slot * width, y, width - 4, 27, color, name, size=11)
    picture.note(254, "A folder imports only from those below it, and of a row only from those to its right.")
    return picture.svg()


PICTURES: dict[str, Callable[[], str]] = {
    "step_with_roles": step_with_roles,
    "nodes": nodes,
    "weight_sync": weight_sync,
    "batches": batches,
    "conversation": conversation,
    "your_code": your_code,
    "run_files": run_files,
    "sampling_order": sampling_order,
    "stages": stages,
    "layers": layers,
}
"""Name of a file without its ending -> function that draws it."""

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw(), encoding="utf-8")
