"""Benchmarks of hpctrain that docs/ cites, to be run in the root of the repository:

python -m scripts.bench CASE      digits, resnet50, tree, data, pack; [--against COMMIT]
"""
