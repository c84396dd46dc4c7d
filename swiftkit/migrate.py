"""Words of ms-swift's command line, and what each is here: the table of `swiftkit help migrate`.

Source of the words: ms-swift, docs/source_en/Instruction/Command-line-parameters.md.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

Kind = Literal["verb", "flag", "environment"]
Status = Literal["accepted", "translated", "not yet", "refused"]


@dataclass(frozen=True)
class Entry:
    """What became of a word.

    `ours` is the knob or verb here that takes its place (None where there is none), `values` the values that
    have another name here. A word that ends in `*` stands for all that begin like it.
    """

    word: str
    kind: Kind
    status: Status
    ours: str | None = None
    note: str = ""
    values: Mapping[str, str] = field(default_factory=dict)

    def sentence(self) -> str:
        """The entry as one sentence for an error message."""
        dashes = "--" if self.kind == "flag" else ""
        fate = {
            "accepted": "is the same word here",
            "translated": f"is {dashes}{self.ours} here",
            "not yet": "is not built yet",
            "refused": "does not exist here",
        }[self.status]
        return f"ms-swift's {dashes}{self.word} {fate}" + (f": {self.note}" if self.note else "")


def _same(words: str, note: str = "", **values: str) -> list[Entry]:
    return [Entry(word, "flag", "accepted", word, note, values) for word in words.split()]


def _ours(word: str, ours: str, note: str = "", **values: str) -> list[Entry]:
    return [Entry(word, "flag", "translated", ours, note, values)]


def _later(words: str, note: str = "") -> list[Entry]:
    return [Entry(word, "flag", "not yet", None, note) for word in words.split()]


def _never(words: str, note: str) -> list[Entry]:
    return [Entry(word, "flag", "refused", None, note) for word in words.split()]


_VERBS = [
    Entry("sft", "verb", "accepted", "sft"),
    Entry("pt", "verb", "translated", "sft", "rows of plain `text` are trained on every token"),
    Entry("infer", "verb", "translated", "chat", "--prompt answers one prompt and ends"),
    Entry("rlhf", "verb", "translated", "dpo", "reward models are `reward`; ppo and grpo are not built yet"),
    Entry("export", "verb", "translated", "merge", "CHECKPOINT OUT; pushes, converts; AWQ, GPTQ: `quantize`"),
    Entry("merge-lora", "verb", "translated", "merge", "CHECKPOINT OUT"),
    Entry("eval", "verb", "accepted", "eval", "over files of rows, or --tasks of lm-evaluation-harness"),
    Entry("deploy", "verb", "not yet", None, "vLLM serves the adapter, which is in PEFT's format"),
    Entry("app", "verb", "refused", None, "there is no web interface; `chat` is in the terminal"),
    Entry("web-ui", "verb", "refused", None, "there is no web interface; `chat` is in the terminal"),
    Entry("sample", "verb", "refused", None, "rows are not generated here"),
    Entry("rollout", "verb", "refused", None, "nothing is served beside a training run"),
    Entry("megatron", "verb", "refused", None, "`sft` is the one way to train"),
]

_MODEL = [
    *_same("model", "a name of `swiftkit ls`, a hub id (of Hugging Face, not ModelScope), or a folder"),
    *_ours("model_id_or_path", "model"),
    *_ours("model_revision", "revision"),
    *_ours("torch_dtype", "base_precision", "float16 is not trained in", bfloat16="bf16", float32="fp32"),
    *_ours("dtype", "base_precision", "fp16 is not trained in", AUTO="auto"),
    *_ours("use_hf", "model_source", "auto takes Hugging Face already", true="hf"),
    *_ours("template", "chat_template", "a Jinja file or `chatml`; without it the tokenizer's own"),
    *_ours("template_type", "chat_template", "a Jinja file or `chatml`; without it the tokenizer's own"),
    *_never("model_type task_type num_labels problem_type", "what a model is, its config.json says"),
    *_never("attn_impl", "the attention is swiftkit's own, and right for packed windows"),
    *_never("device_map max_memory", "the machine decides; --device cpu or cuda picks its kind"),
    *_never("rope_scaling max_model_len", "write it into the model's config.json"),
    *_ours("new_special_tokens", "new_tokens", "words, or a .txt file; each starts as its pieces' mean"),
    *_never("init_strategy", "new tokens start as the mean of the tokens that their text was before"),
    *_never("local_repo_path model_kwargs check_model", "nothing here needs it"),
    *_never("custom_register_path external_plugins", "a model needs no registration: give its folder or id"),
    *_never("hub_token", "`hf auth login`, or the variable HF_TOKEN"),
    *_never(
        "load_args load_data_args ignore_args_error",
        "--adapters brings model and precision back from args.json, always",
    ),
]

_QUANTIZED = [
    *_ours("quant_bits", "base_precision", "alone, without quant_method", **{"4": "nf4", "8": "fp8"}),
    *_never("quant_method", "leave it out; 4 bits are --base_precision nf4, 8 bits --base_precision fp8"),
    *_ours("bnb_4bit_compute_dtype", "nf4_compute", bfloat16="bf16"),
    *_never("bnb_4bit_quant_type", "leave it out; the 4 bits of --base_precision nf4 are NF4"),
    *_never(
        "bnb_4bit_use_double_quant bnb_4bit_quant_storage",
        "leave it out; --base_precision nf4 has one form: packed in bytes, one fp32 scale for 64 weights",
    ),
    *_never("hqq_axis", "HQQ is not used"),
]

_DATA = [
    *_same("dataset", "`path.jsonl#500` takes the first 500 rows, not a random 500"),
    *_same("val_dataset split_dataset_ratio"),
    *_same("system", "the text itself; a .txt path is not opened"),
    *_same("max_length", "auto is the longest row, at most 4,096 tokens; in ms-swift the model's maximum"),
    *_ours("max_seq_length", "max_length"),
    *_same("truncation_strategy", "drop, left or right; what is dropped is counted and said", delete="drop"),
    *_same("packing", "on unless it is switched off, and exact: rows of a window never see each other"),
    *_ours("padding_free", "packing", "windows hold several rows without padding between them"),
    *_ours("packing_length", "max_length", "rows are packed into windows of this length"),
    *_ours("data_seed", "seed", "one seed for data order, adapter and dropout"),
    *_same("columns", "each pair either way round: a name of yours and one of an accepted shape"),
    *_never("strict", "a row that cannot be read stops the run, unless --skip_bad_rows counts it"),
    *_ours("loss_scale", "train_on", default="assistant", last_round="last", all="all"),
    *_same("streaming", "for hf:: and ms::; a file's rows are never in memory all at once"),
    *_same("interleave_prob", "exact shares of the rows, not chances"),
    *_same("stopping_strategy"),
    *_never("shuffle_buffer_size", "windows are shuffled as a whole"),
    *_same("load_from_cache_file dataset_num_proc"),
    *_never("cached_dataset packing_num_proc", "what was tokenised and packed is found again by its content"),
    *_never("dataset_shuffle train_dataloader_shuffle", "training rows are shuffled by --seed, always"),
    *_never("val_dataset_shuffle", "evaluation takes every row; its order changes nothing"),
    *_never("lazy_tokenize download_mode remove_unused_columns custom_dataset_info", "nothing here needs it"),
    *_never("dataloader_*", "windows are in memory before the first step; there is no loader to tune"),
    *_never("use_chat_template", "rows with turns are rendered by the template, rows of plain text are not"),
    *_never("agent_template response_prefix template_backend", "the tokenizer's Jinja template renders rows"),
    *_never("padding_side", "windows are packed"),
    *_never("model_name model_author", "write the names into the rows"),
    *_never("max_pixels norm_bbox vit_* aligner_lr freeze_llm freeze_vit freeze_aligner", "text only"),
]

_ADAPTER = [
    *_same("tuner_type", "lora or full"),
    *_ours("train_type", "tuner_type", "lora or full"),
    *_ours("sft_type", "tuner_type", "lora or full"),
    *_same("lora_rank", "16; in ms-swift 8"),
    *_same("lora_alpha"),
    *_same("lora_dropout", "0; in ms-swift 0.05"),
    *_same("target_modules"),
    *_ours("lora_target_modules", "target_modules", ALL="all-linear"),
    *_later("target_parameters target_regex", "--target_modules takes names and all-linear"),
    *_same("modules_to_save", "embed_tokens lm_head, or other modules with weights of their own"),
    *_later("trainable_parameters* freeze_parameters*", "--modules_to_save names what is trained whole"),
    *_same("use_dora use_rslora"),
    *_ours("lorap_lr_ratio", "loraplus_lr_ratio"),
    *_ours("init_weights", "init_lora_weights", "true, pissa or pissa_niter_N"),
    *_never("tuner_backend", "the LoRA layer is swiftkit's own; its file is PEFT's format"),
    *_never(
        "lora_bias lora_dtype lora_ga_*",
        "adapters have no bias, and their factors are float32",
    ),
    *_never(
        "fourier_* boft_* vera_* adalora_* reft_* llamapro_* lisa_* galore_* use_galore",
        "LoRA is the adapter here",
    ),
]

_TRAINING = [
    *_same("num_train_epochs"),
    *_ours("max_epochs", "num_train_epochs"),
    *_same("max_steps"),
    *_same("per_device_train_batch_size", "counted in packed windows; auto fills the device"),
    *_ours("batch_size", "per_device_train_batch_size", "counted in packed windows"),
    *_same("gradient_accumulation_steps", "auto follows from --global_batch_size: 8 windows; in ms-swift 16"),
    *_same("global_batch_size", "Megatron-SWIFT's word; counted in windows here"),
    *_same("learning_rate", "1e-4, or what the model's recipe says; 1e-5 with --tuner_type full"),
    *_same("lr_scheduler_type", "cosine, linear or constant"),
    *_same("warmup_ratio", "0.03; in ms-swift 0"),
    *_same("weight_decay", "0; in ms-swift 0.1"),
    *_same("adam_beta1"),
    *_same("adam_beta2", "0.999; in ms-swift 0.95"),
    *_same("max_grad_norm seed"),
    *_same("resume_from_checkpoint", "a checkpoint, a run folder, or auto; a resumed run is bit-equal"),
    *_never("resume_only_model", "--init_adapter begins a new run from an adapter"),
    *_never("ignore_data_skip", "a resumed run takes the rows that come next"),
    *_later("gradient_checkpointing*", "everything is kept for the backward pass"),
    *_ours(
        "deepspeed", "layout", "DeepSpeed is not used", zero0="ddp", zero1="ddp", zero2="ddp", zero3="fsdp"
    ),
    *_ours("fsdp", "layout", "fsdp or hsdp"),
    *_ours("deepspeed_autotp_size", "tensor_parallel_size"),
    *_never("fsdp_config zero_hpz_partition_size", "--layout hsdp keeps parts inside each machine"),
    *_later("sequence_parallel_size", "every process holds the whole sequence"),
    *_never("ddp_* average_tokens_across_devices", "gradients are sums over the tokens of all processes"),
    *_never("use_liger_kernel use_logits_to_keep", "the loss projects only trained positions, always"),
    *_same("optim", "or adamw_8bit", adamw_bnb_8bit="adamw_8bit", adamw_torch_fused="adamw_torch"),
    *_never("optimizer", "--optim adamw_torch or adamw_8bit"),
    *_never("lr_scheduler_kwargs", "cosine, linear and constant have nothing to set"),
    *_never(
        "metric acc_strategy enable_dft_loss enable_channel_loss predict_with_generate",
        "cross entropy over the trained tokens; evaluation gives loss and perplexity",
    ),
    *_never("neftune_noise_alpha router_aux_loss_coef full_determinism", "it is not offered"),
    *_never("use_ray ray_exp_name device_groups", "no Ray"),
]

_RUN = [
    *_same("logging_steps"),
    *_same("eval_steps", "100; in ms-swift --save_steps"),
    *_same("save_steps save_total_limit"),
    *_same("output_dir", "the run's folder is OUTPUT_DIR/<model>/v<N>-<date>-<time>"),
    *_same("report_to", "tensorboard, wandb or none"),
    *_never("eval_strategy", "--eval_steps counts; without rows for it there is no evaluation"),
    *_never("save_strategy", "--save_steps counts; the last step is always saved"),
    *_never("per_device_eval_batch_size", "evaluation takes the windows of training"),
    *_never(
        "logging_dir logging_first_step add_version create_checkpoint_symlink save_on_each_node",
        "a run's folder has one form: runs/, logging.jsonl, checkpoint-<N>/",
    ),
    *_never("config", "give the file itself: `swiftkit sft run.yaml`"),
    *_same("metric_for_best_model", "eval_loss or eval_perplexity", loss="eval_loss"),
    *_same("load_best_model_at_end"),
    *_ours("early_stop_interval", "early_stopping_patience", "counted in evaluations"),
    *_never("greater_is_better", "losses and perplexities: the smaller the better"),
    *_same("push_to_hub", "of `swiftkit merge`, with the hub's id behind it"),
    *_ours("hub_model_id", "push_to_hub", "of `swiftkit merge`"),
    *_ours("hub_private_repo", "private", "of `swiftkit merge`"),
    *_same("max_shard_size", "of `swiftkit merge`"),
    *_later(
        "save_only_model use_flash_ckpt save_safetensors safe_serialization",
        "a checkpoint is a PEFT adapter in safetensors",
    ),
    *_never("merge_lora", "a verb of its own: `swiftkit merge CHECKPOINT OUT`"),
    *_ours("eval_dataset", "tasks", "of lm-evaluation-harness, in `swiftkit eval`; a file is its --dataset"),
    *_ours("eval_limit", "limit", "in `swiftkit eval`"),
    *_never("eval_use_evalscope eval_backend eval_dataset_args eval_generation_config", "no EvalScope here"),
    *_never("swanlab_*", "--report_to tensorboard or wandb"),
]

_CHAT = [
    *_same("adapters", "one checkpoint or run folder; for `chat`"),
    *_ours("ckpt_dir", "adapters"),
    *_same("max_new_tokens", "512"),
    *_same("temperature", "0, the likeliest token, unless it is set"),
    *_same("top_p"),
    *_never("stream", "answers are always streamed"),
    *_later(
        "top_k repetition_penalty num_beams stop_words logprobs top_logprobs", "only --temperature, --top_p"
    ),
    *_never("infer_backend vllm_* sglang_* lmdeploy_*", "no engine of another project runs inside swiftkit"),
]

_ALIGNMENT = [
    *_never("rlhf_type", "the verbs `dpo` and `reward`; orpo, simpo, cpo and kto are --loss_type of `dpo`"),
    *_same("beta", "of `dpo`; auto is 0.1, for simpo 2"),
    *_same("loss_type", "of `dpo`: sigmoid, sigmoid_norm, ipo, hinge, robust, orpo, simpo, cpo or kto"),
    *_same("ref_model", "of `dpo`; without it the policy that training starts from, its adapter included"),
    *_ours("ref_adapters", "ref_model", "a checkpoint brings its base"),
    *_never("ref_model_type ref_model_revision", "what a model is, its config.json says"),
    *_same("label_smoothing simpo_gamma desirable_weight undesirable_weight", "of `dpo`"),
    *_same("rpo_alpha", "of `dpo`; auto is 1 for orpo and cpo, else 0"),
    *_ours("cpo_alpha", "rpo_alpha", "of `dpo` with --loss_type cpo"),
    *_same("center_rewards_coefficient", "of `reward`"),
    *_later("ld_alpha discopop_tau loss_weights", "one loss at a time, by --loss_type"),
    *_later(
        "max_completion_length num_generations reward_funcs reward_model reward_weights epsilon "
        "num_iterations",
        "ppo and grpo",
    ),
    *_later("lmbda sft_alpha seq_kd teacher_model offload_teacher_model", "distillation"),
]

_ENVIRONMENT = [
    Entry("CUDA_VISIBLE_DEVICES", "environment", "accepted", "CUDA_VISIBLE_DEVICES"),
    *(
        Entry(word, "environment", "accepted", word)
        for word in ("NPROC_PER_NODE", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
    ),
]

TABLE: Mapping[str, list[Entry]] = {
    "verbs": _VERBS,
    "model": _MODEL,
    "quantized base": _QUANTIZED,
    "data": _DATA,
    "adapter": _ADAPTER,
    "training": _TRAINING,
    "run": _RUN,
    "chat": _CHAT,
    "alignment": _ALIGNMENT,
    "environment": _ENVIRONMENT,
}


def lookup(word: str, kind: Kind = "flag") -> Entry | None:
    """What became of a flag (with or without its dashes), a verb or an environment variable of ms-swift.

    A pattern such as `vllm_*` answers with the word that was asked for.
    """
    plain = word.lstrip("-").partition("=")[0]
    plain = plain.replace("-", "_") if kind == "flag" else plain
    for entries in TABLE.values():
        for entry in entries:
            if entry.kind == kind and fnmatchcase(plain, entry.word):
                return Entry(plain, kind, entry.status, entry.ours, entry.note, entry.values)
    return None


def table(width: int = 100) -> str:
    """The whole table, for `swiftkit help migrate`."""
    lines = ["Words of ms-swift, and what each is here"]
    for heading, entries in TABLE.items():
        lines += ["", heading]
        for entry in entries:
            dashes = "--" if entry.kind == "flag" else ""
            there = f"is {dashes}{entry.ours}" if entry.status == "translated" else entry.status
            renamed = ", ".join(f"{old} is {new}" for old, new in entry.values.items())
            note = "; ".join(part for part in (there, entry.note, renamed) if part)
            lines += textwrap.wrap(
                note,
                width,
                initial_indent=f"  {dashes + entry.word:<32} ",
                subsequent_indent=" " * 35,
                break_on_hyphens=False,
            )
    return "\n".join(lines)
