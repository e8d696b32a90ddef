"""Measurements of hpctrain that the pages of docs/ cite, run in the root of the repository:

python -m scripts.benchmarks CASE      digits, resnet50, tree, balance, sweep, data (cases.py)
python -m scripts.benchmarks.predict RUN PHOTOS
python -m scripts.benchmarks.operators [--device cuda]
scripts/gpu_check                      all that needs a GPU (gpu/)
"""
