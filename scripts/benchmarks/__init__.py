"""Benchmarks of hpctrain that docs/ cites, to be run in the root of the repository:

python -m scripts.benchmarks CASE      digits, resnet50, tree, sweep, data; [--against COMMIT]
python -m scripts.benchmarks.operators [--device cuda]
scripts/gpu_check                      everything that needs a GPU (gpu/)
"""
