"""``hpctrain watch [RUN...]``: monitor runs while they train, in a terminal or in a browser.

Reads the folders of the runs only and needs neither MPI nor torch.
"""

from hpctrain.watch.terminal import main as main
