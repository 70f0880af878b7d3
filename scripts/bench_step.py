"""One measured training step in a process of its own; prints one line of JSON.

Data, sizes and measures are those of the peers' harness: random states, process CPU-seconds, and
as step memory the growth of the resident set over what model, batch and optimizer object take.
"""

import argparse
import importlib
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.data.batches import align, pack
from slipstream.data.types import DraftBatch, HiddenStateSample
from slipstream.drafters.config import DraftGeometry, Init
from slipstream.drafters.eagle3 import Eagle3Head
from slipstream.train.config import LossConfig, LossKind, TeacherForm, UnrollConfig
from slipstream.train.ttt import FrozenTarget, Unroller, UnrollPlan, plan_unroll

STATE_BYTES = 12
"""Gradient and two Adam moments of a parameter."""


def parse_arguments() -> argparse.Namespace:
    """The size of the step; the names that the peers' harness knows mean the same there."""
    parser = argparse.ArgumentParser(description=__doc__)
    sizes = {"hidden": 256, "heads": 4, "kv-heads": 2, "intermediate": 768, "vocab": 4000}
    sizes |= {"draft-vocab": 4000, "seq-len": 512, "num-documents": 1, "ttt": 7}
    sizes |= {"steps": 1, "warmup": 1, "threads": 1, "chunk-mib": LossConfig.chunk_mib}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--mask-frac", type=float, default=1.0)
    parser.add_argument("--survival", type=float, default=1.0)
    parser.add_argument("--loss", type=LossKind, default=LossKind.ce)
    parser.add_argument("--teacher", type=TeacherForm, default=LossConfig.teacher)
    parser.add_argument("--freeze-head", action="store_true", help="lm_head is not trained")
    parser.add_argument("--naive", action="store_true", help="the reference of the tests instead")
    return parser.parse_args()


def make_head(a: argparse.Namespace, generator: torch.Generator) -> tuple[Eagle3Head, FrozenTarget]:
    """A random head and target; as in real maps, every argmax lies in the draft vocabulary."""
    geometry = DraftGeometry(
        hidden_size=a.hidden,
        intermediate_size=a.intermediate,
        num_layers=1,
        num_attention_heads=a.heads,
        num_key_value_heads=a.kv_heads,
        head_dim=a.hidden // a.heads,
        vocab_size=a.vocab,
        draft_vocab_size=a.draft_vocab,
        aux_layers=(1, 2, 3),
        rms_norm_eps=1e-6,
        max_position_embeddings=a.seq_len + a.ttt,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        norm_before_residual=False,
        norm_before_fc=False,
        fc_norm=False,
        norm_output=False,
        qk_norm=False,
    )
    draft_ids = torch.full((a.vocab,), -1)
    draft_ids[: a.draft_vocab] = torch.arange(a.draft_vocab)
    frozen = FrozenTarget(
        embedding_VD=torch.randn(a.vocab, a.hidden, generator=generator) * 0.02,
        norm_D=torch.ones(a.hidden),
        norm_eps=1e-6,
        lm_head_WD=torch.randn(a.draft_vocab, a.hidden, generator=generator) * 0.05,
        draft_ids_V=draft_ids,
    )
    head = Eagle3Head(geometry)
    head.initialise(Init.random, lm_head_WD=frozen.lm_head_WD, norm_D=frozen.norm_D, seed=0)
    head.lm_head.requires_grad_(not a.freeze_head)
    return head, frozen


def make_batch(a: argparse.Namespace, frozen: FrozenTarget, generator: torch.Generator) -> DraftBatch:
    """Documents of one prompt and one answer, which is the last `mask_frac` of the tokens."""
    mask = torch.arange(a.seq_len) >= round((1 - a.mask_frac) * a.seq_len)
    documents = []
    for i in range(a.num_documents):
        last = torch.randn(int(mask.sum()), a.hidden, generator=generator)
        logits = [F.rms_norm(rows, (a.hidden,)) @ frozen.lm_head_WD.T for rows in last.split(64)]
        sample = HiddenStateSample(
            id=str(i),
            input_ids_T=torch.randint(a.vocab, (a.seq_len,), generator=generator),
            loss_mask_T=mask,
            aux_TLD=torch.randn(a.seq_len, 3, a.hidden, generator=generator),
            last_hidden_PD=last,
            argmax_P=torch.cat([rows.argmax(-1) for rows in logits]),
            logsumexp_P=torch.cat([rows.logsumexp(-1) for rows in logits]) + 0.1,
        )
        documents.append(align(sample, seed=0, epoch=0))
    return pack(documents)


def count_flops(a: argparse.Namespace, plan: UnrollPlan, num_teachers: int) -> float:
    """Products that the step cannot do without (ALGORITHMS.md section 5), forward and backward."""
    width, keys = a.hidden, a.hidden // a.heads * a.kv_heads
    rows = sum(step.kept_R.numel() for step in plan.steps)
    later, tokens = rows - plan.steps[0].kept_R.numel(), a.seq_len * a.num_documents
    layer = 6 * width * (rows * (2 * width + 3 * a.intermediate) + 2 * keys * (later + tokens))
    shares = 4 * tokens * width * (3 * width + width + 2 * keys)  # fc and the embedding's half
    head = (4 if a.freeze_head else 6) * sum(plan.loss_rows.rows_of_steps()) * a.draft_vocab * width
    seen = sum(int((step.rows.row_R - step.rows.first_R + 1).sum()) for step in plan.steps)
    return float(layer + shares + head + 14 * seen * width + 2 * num_teachers * a.draft_vocab * width)


def make_step(a: argparse.Namespace) -> tuple[Callable[[], Tensor], float, int]:
    """The step, its FLOPs, and the bytes of gradients and optimizer state that outlive it."""
    generator = torch.Generator().manual_seed(0)
    head, frozen = make_head(a, generator)
    batch = make_batch(a, frozen, generator)
    loss, unroll = LossConfig(kind=a.loss, teacher=a.teacher, chunk_mib=a.chunk_mib), UnrollConfig()
    unroll.num_steps, unroll.survival = a.ttt, a.survival
    decay_K = (unroll.step_decay / unroll.survival) ** torch.arange(float(a.ttt))
    parameters = [p for p in head.parameters() if p.requires_grad]
    optimizer, unroller = torch.optim.AdamW(parameters, lr=1e-3, fused=True), Unroller(head, frozen, loss)
    chunk_rows = loss.chunk_rows(a.draft_vocab)

    def plan() -> UnrollPlan:
        return plan_unroll(batch, draft_ids_V=frozen.draft_ids_V, config=unroll, chunk_rows=chunk_rows)

    def forward() -> Tensor:
        total: Tensor
        if a.naive:
            reference = importlib.import_module("tests.naive")
            total = reference.naive_loss(head, batch, frozen, decay_K / num_rows, a.loss)
        else:
            total = unroller(batch, plan(), decay_K / num_rows).loss
        return total

    def step() -> Tensor:
        value = forward()
        value.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        return value.detach()

    num_rows = plan().count_K[0].float()
    state = STATE_BYTES * sum(p.numel() for p in parameters)
    return step, count_flops(a, plan(), len(batch.argmax_P)), state


def resident_mib(key: str) -> float:
    """VmRSS, or VmHWM: its peak since the last reset."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1]) / 1024


def matmul_rate() -> float:
    """Best FLOP/s of this thread in a product of the size of a chunk of logits."""
    left, right = torch.randn(1024, 1024), torch.randn(1024, 2048)
    seconds = []
    for _ in range(6):
        start = time.process_time()
        left @ right
        seconds.append(time.process_time() - start)
    return 2 * 1024 * 1024 * 2048 / min(seconds[1:])


def main() -> None:
    """Measures and prints."""
    a = parse_arguments()
    torch.set_num_threads(a.threads)
    step, flops, state = make_step(a)
    rate = matmul_rate()
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # forgets the peak so far
    before = resident_mib("VmRSS")
    cpu, wall = [], []
    for _ in range(a.warmup + a.steps):
        cpu_start, wall_start = time.process_time(), time.perf_counter()
        loss = float(step())
        cpu.append(time.process_time() - cpu_start)
        wall.append(time.perf_counter() - wall_start)
    figures = {
        "cpu_s": min(cpu[a.warmup :]),
        "wall_s": min(wall[a.warmup :]),
        "step_mib": resident_mib("VmHWM") - before,
        "state_mib": state / 2**20,
        "flops": flops,
        "matmul_rate": rate,
        "loss": loss,
    }
    print(json.dumps(figures))
