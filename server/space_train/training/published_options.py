"""The options of the published training and evaluation scripts, and the same of ours."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PublishedOption:
    """An option of the published script as it was run, and ours."""

    published: str
    ours: str
    remark: str = ""


TRAINING_OPTIONS: tuple[PublishedOption, ...] = (
    # SPACE's own
    PublishedOption("--mask_num 5", "--num-masks 5"),
    PublishedOption("--mask_id 32002", "--mask-ids 32002", "published: the first id behind a vocabulary of 32002"),
    PublishedOption("--mask_diff True", "--mask-ids 32002 32003 …", "one id for each mask instead of a shared one"),
    PublishedOption("--mask_prob 0.5", "--ar-share 0.5", "share of the samples that stay whole: 1 - mask_prob"),
    PublishedOption("--mask_loss_weight 1", "--mask-loss-weight 1"),
    PublishedOption(
        "--mask_efficient_train False", "--anchors one", "False cuts the text; True keeps it: --anchors many"
    ),
    PublishedOption(
        "--mask_random False", "--keep 1", "True: fewer than k masks now and then; we keep a share of them"
    ),
    PublishedOption("(cuts drawn once, when data is read)", "--fixed-cuts"),
    # Data
    PublishedOption("--dataset alpaca_gpt4_en,lima", "--data alpaca.json lima.jsonl", "files or hub ids, no registry"),
    PublishedOption("--dataset_dir data", "--data data/alpaca.json"),
    PublishedOption("--template default", "--template paper", "also vicuna, alpaca, plain, raw, or a .jinja file"),
    PublishedOption("--cutoff_len 2048", "--length 2048"),
    PublishedOption("--split train", "--split train"),
    PublishedOption("--max_samples N", "--limit N"),
    PublishedOption("--val_size 0.02", "--held-out-share 0.02"),
    PublishedOption("--sft_packing False", "--no-pack"),
    PublishedOption("--system_prompt TEXT", '(a "system" in the records)'),
    PublishedOption("--overwrite_cache, --remove_unused_columns", "(nothing to say)", "no cache, no unused columns"),
    # Model and optimiser
    PublishedOption("--model_name_or_path DIR", "--model DIR"),
    PublishedOption("--finetuning_type full", "--method full"),
    PublishedOption("--learning_rate 5e-5", "--learning-rate 5e-5"),
    PublishedOption("--lr_scheduler_type cosine", "--cosine", "else: flat, then linear to 0"),
    PublishedOption("--num_train_epochs 2.0", "--epochs 2"),
    PublishedOption("--per_device_train_batch_size 2", "--rows-per-step 32", "over all devices: 2 × 2 × 8 devices"),
    PublishedOption("--gradient_accumulation_steps 2", "--accumulate 2"),
    PublishedOption("--bf16 true", "--precision bf16"),
    # The run
    PublishedOption("accelerate launch src/train_bash.py", "accelerate launch -m space_train"),
    PublishedOption("--stage sft, --do_train", "(always)"),
    PublishedOption("--output_dir DIR", "--out DIR", "the checkpoint is in DIR/model"),
    PublishedOption("--overwrite_output_dir", "--restart", "else a run goes on where it was"),
    PublishedOption("--save_strategy epoch", "--checkpoint-steps N", "or --checkpoint-seconds"),
    PublishedOption("--logging_steps 10, --plot_loss", "(always)"),
)
"""Of run_sft_multi_node.sh and its data arguments (github.com/cteant/SPACE); the values are those published."""

EVALUATION_OPTIONS = (
    PublishedOption("--llm_dir DIR", "--model DIR", "reports went into DIR; ours go into --out"),
    PublishedOption("--dataset NAME", "--tasks NAME[,NAME...]", "xsum, human_eval, cip; mt-bench is mt_bench"),
    PublishedOption("--model_type NAME", "--family NAME", "llama is llama-2 (Vicuna too), llama-2-chat, qwen, chatglm"),
    PublishedOption("--mask_id N", "--mask-ids N", "only for checkpoints whose config.json does not say it"),
    PublishedOption("--mask_num N", "--num-masks N, --k N", "how many masks the model has; how many are used"),
    PublishedOption("--mask_diff true", "--mask-ids N N+1 ...", "one id per mask; one id alone is shared by all"),
    PublishedOption("--do_sample true", "--temperature 1", "theirs is not exact when sampling; ours always is"),
    PublishedOption("--use_cache BOOL", "(always on)", "theirs computes the prompt again each step without it"),
    PublishedOption("--save_data true", "(always)", "OUT/answers.jsonl: ids, text, steps and seconds of every prompt"),
    PublishedOption("--assist_generation", "spaceserve eval speed --against assisted:DRAFT", "transformers' own loop"),
)
"""Options of tests/eval_infer.py in the paper's repository."""


def options_table(options: tuple[PublishedOption, ...] = TRAINING_OPTIONS) -> str:
    """Three columns of plain text, for --help."""
    first = max(len(option.published) for option in options)
    second = max(len(option.ours) for option in options)
    return "\n".join(f"  {o.published:{first}}  {o.ours:{second}}  {o.remark}".rstrip() for o in options)
