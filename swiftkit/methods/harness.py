"""Tasks of lm-evaluation-harness (https://github.com/EleutherAI/lm-evaluation-harness) over our engine.

Imported only where that package is installed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from lm_eval.api.model import TemplateLM
from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, make_table

from swiftkit.config import EvalConfig
from swiftkit.engine import Engine
from swiftkit.errors import UserError, nearest
from swiftkit.generate.batch import generate
from swiftkit.generate.load import ReadyModel, Say
from swiftkit.generate.sampling import Sampler
from swiftkit.generate.score import score

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

WINDOW = 2048  # tokens, where a model's config sets no limit
MAX_GEN_TOKS = 256  # where a task does not say how long an answer is
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


class HarnessModel(TemplateLM):
    """What the harness asks of a model: how likely a text is, and what follows one.

    Texts become tokens as they do in the harness's own model over transformers, so that scores compare.

    Args:
        engine, tokenizer: the model.
        stops: tokens that end an answer.
        window: tokens that the model can read; what is longer loses its beginning.
        slots: answers that are written at once.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: PreTrainedTokenizerFast,
        *,
        stops: set[int],
        window: int | None,
        slots: int | Literal["auto"] = "auto",
    ):
        super().__init__()
        self.engine, self.tokenizer, self.stops, self.slots = engine, tokenizer, stops, slots
        self.max_length = window or WINDOW

    @property
    def eot_token_id(self) -> int:
        """The tokenizer's end-of-sequence token."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """What the first token of a text follows."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    @property
    def tokenizer_name(self) -> str:
        """For the harness's own cache of requests."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """A conversation as text; without the generation prompt its last message goes on."""
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids; left to itself the tokenizer puts its start token in front, unless it stands there."""
        if add_special_tokens is None:
            begun = string.startswith(str(self.tokenizer.decode(self.prefix_token_id)))
            add_special_tokens = not begun
        return list(self.tokenizer.encode(string, add_special_tokens=add_special_tokens))

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """(log p, is it the greedy answer) of each continuation behind its context."""
        # The last token is only looked for, not read: one more than the window fits.
        texts = [((before + after)[-(self.max_length + 1) :], len(after)) for _, before, after in requests]
        return [(found.logprob, found.greedy) for found in score(self.engine, texts)]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """log p of whole texts, in windows that do not overlap."""
        windows = [
            [
                (None, *make_disjoint_window(window))
                for window in get_rolling_token_windows(
                    self.tok_encode(request.args[0]), self.prefix_token_id, self.max_length, 1
                )
            ]
            for request in requests
        ]
        scores = iter(self._loglikelihood_tokens([window for own in windows for window in own]))
        return [sum(next(scores)[0] for _ in own) for own in windows]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """What follows each context, up to one of its stop texts."""
        answers: list[str] = [""] * len(requests)
        groups: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(index)
        for indices in groups.values():
            texts = self._answers([requests[i].args[0] for i in indices], requests[indices[0]].args[1])
            for index, text in zip(indices, texts, strict=True):
                answers[index] = text
        return answers

    def _answers(self, contexts: Sequence[str], settings: Mapping[str, Any]) -> list[str]:
        """Answers that share their settings, as a task's `generation_kwargs` has them."""
        until = settings.get("until") or []
        until = [word for word in ([until] if isinstance(until, str) else until) if word]
        longest = int(next((settings[name] for name in LENGTHS if settings.get(name)), MAX_GEN_TOKS))
        if longest >= self.max_length:
            raise UserError(
                f"a task asks for answers of {longest} tokens, and the model's window has {self.max_length}"
            )
        prompts = [self.tok_encode(context)[-(self.max_length - longest) :] for context in contexts]
        tail = max((len(word.encode()) for word in until), default=0) + 1  # a token is at least one byte

        def ends(_: int, ids: list[int]) -> bool:
            text = self.tokenizer.decode(ids[-tail:], skip_special_tokens=True)
            return any(word in text for word in until)

        answers = generate(
            self.engine,
            prompts,
            max_new_tokens=longest,
            stop_ids=self.stops,
            slots=self.slots,
            sampler=_sampler(settings),
            ends=ends if until else None,
        )
        return [_cut(str(self.tokenizer.decode(a.ids, skip_special_tokens=True)), until) for a in answers]


def _sampler(settings: Mapping[str, Any]) -> Sampler:
    """Greedy, unless a task asks for samples."""
    temperature, sampled = float(settings.get("temperature") or 0.0), settings.get("do_sample")
    if sampled is False or (sampled is None and temperature == 0):
        return Sampler()
    return Sampler(temperature or 1.0, float(settings.get("top_p") or 1.0))


def _cut(text: str, until: Sequence[str]) -> str:
    for word in until:
        text = text.split(word)[0]
    return text


def find_tasks(names: Sequence[str], include_path: str | None) -> TaskManager:
    """The harness's tasks, those of a folder of yours among them.

    Raises:
        UserError: for a name that is no task, with the nearest one.
    """
    manager = TaskManager(include_path=include_path)
    for name in names:
        if not manager.match_tasks([name]):
            offer = nearest(name, manager.all_tasks, say="; did you mean {}?")
            raise UserError(f"--tasks {name}: lm-evaluation-harness has no such task{offer}")
    return manager


def evaluate_tasks(
    config: EvalConfig,
    engine: Engine,
    ready: ReadyModel,
    *,
    manager: TaskManager,
    window: int | None,
    say: Say,
) -> dict[str, Any]:
    """Run tasks, print the harness's table, and return its numbers by task.

    Raises:
        UserError: a task's data cannot be read.
    """
    model = HarnessModel(
        engine, ready.tokenizer, stops=ready.stops, window=window, slots=config.max_batch_size
    )
    try:
        found = simple_evaluate(
            model=model,
            tasks=manager.match_tasks(config.tasks),
            task_manager=manager,
            num_fewshot=config.num_fewshot,
            limit=config.limit,
            apply_chat_template=config.apply_chat_template,
            system_instruction=config.system if config.apply_chat_template else None,
            log_samples=False,
        )
    except OSError as failure:  # hubs and files alike
        reason = " ".join(str(failure).split())
        raise UserError(f"--tasks {' '.join(config.tasks)}: the data cannot be read: {reason}") from None
    assert found is not None, "there is one process"
    say(make_table(found).rstrip())
    results: dict[str, Any] = found["results"]
    return results
