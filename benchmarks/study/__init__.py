"""Which options of linear attention with RoPE earn their place: a study that one command repeats.

    python -m benchmarks.study run --out runs/study     # goes on where it was stopped
    python -m benchmarks.study table runs/study
    python -m benchmarks.study plot runs/study

docs/evidence.md has the questions, the findings and how they were measured; docs/evidence_tables.md has the tasks, the
models and all results.
"""
