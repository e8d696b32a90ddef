"""Optimizers as users write them, right ones and wrong ones."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch.optim import SGD, Adam, Muon, Optimizer

COUNT = [0]


class Twist(Optimizer):
    """Descent along the sign of a momentum, smaller every third step of a group.

    Its state has whatever a state may have: tensors in float64 and in the strides of the weights,
    a number a parameter, counts of a group, a number of no parameter, and an entry of its own.
    """

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr, "weight_decay": 0.0, "beta": 0.9, "step": 0})
        self.tried = [0, (0.5, None)]

    @torch.no_grad()
    def step(self, closure=None):
        self.state["all"] = self.state.get("all", 0) + 1
        self.tried[0] += 1
        for group in self.param_groups:
            group["step"] += 1
            share = 0.5 if (group["step"] + self.tried[0] + self.state["all"]) % 3 == 0 else 1.0
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["exact"] = torch.zeros_like(parameter, dtype=torch.float64)
                    state["history"] = [torch.zeros_like(parameter)]
                    state["largest"] = 0.0
                gradient = parameter.grad + group["weight_decay"] * parameter
                state["exact"].lerp_(gradient.double(), 1 - group["beta"])
                state["history"][0].add_(gradient)
                state["largest"] = max(state["largest"], gradient.abs().max().item())
                update = state["exact"] / (state["largest"] + 1e-3) + 1e-3 * state["history"][0]
                parameter.sub_(share * group["lr"] * update)

    def state_dict(self):
        return {**super().state_dict(), "tried": self.tried}

    def load_state_dict(self, state):
        state = dict(state)
        self.tried = state.pop("tried")
        super().load_state_dict(state)


def sgd_with_a_twist(params, lr):
    return Twist(params, lr)


class CountOutside(SGD):
    def step(self, closure=None):
        COUNT[0] += 1
        for group in self.param_groups:
            group["lr"] /= COUNT[0]
        super().step()


class CountOfItsOwn(SGD):
    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.count = 0

    def step(self, closure=None):
        self.count += 1
        for group in self.param_groups:
            group["lr"] /= self.count
        super().step()


class Noisy(SGD):
    """Adds numbers that `draw` returns to the first weights."""

    draw = staticmethod(lambda: torch.rand(()).item())

    def step(self, closure=None):
        super().step()
        with torch.no_grad():
            self.param_groups[0]["params"][0].add_(1e-3 * self.draw())


class NoisyByNumpy(Noisy):
    draw = staticmethod(lambda: np.random.rand() * (np.random.rand() < 0.1))


class NoisyByPython(Noisy):
    draw = staticmethod(random.random)


class KeepsGradient(SGD):
    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["last"] = parameter.grad


class SharesState(SGD):
    """Parameters with as many axes share a tensor."""

    def step(self, closure=None):
        for group in self.param_groups:
            shared = {}
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["size"] = shared.setdefault(parameter.ndim, torch.zeros(()))
                state["size"] += parameter.grad.abs().mean()
                parameter.grad /= 1 + state["size"]
        super().step()


class AddsGroup(SGD):
    def step(self, closure=None):
        super().step()
        self.add_param_group({"params": [torch.zeros(2, requires_grad=True)], "lr_scale": 1.0})


class DropsFactor(SGD):
    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            group.pop("lr_scale", None)


class ReplacesWeights(SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data = parameter.data - group["lr"] * parameter.grad


class NeedsClosure(SGD):
    def step(self, closure):
        closure()


class HasModes(SGD):
    def train(self):
        """As of a schedule-free optimizer."""

    def eval(self):
        """As of a schedule-free optimizer."""


class FixedRate(SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] = 0.125
        super().step()


class KeepsObject(SGD):
    def step(self, closure=None):
        super().step()
        self.state[self.param_groups[0]["params"][0]]["count"] = np.float32(1)


class WithoutDecay(SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            group["weight_decay"] = 0.0
        super().step()


class ForgetsState(Adam):
    def load_state_dict(self, state):
        super().load_state_dict({**state, "state": {}})


class Fails(SGD):
    def step(self, closure=None):
        raise ValueError("4-d weights only")


class FailsLater(SGD):
    """After the steps of the check, of which there are several."""

    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            group["tried"] = group.get("tried", 0) + 1
            if group["tried"] == 30:
                raise ValueError("30 steps are enough")


def muon_of_torch(params, lr):
    return Muon(params, lr)


def without_groups(params, lr):
    return SGD([parameter for group in params for parameter in group["params"]], lr)


def no_optimizer(params, lr):
    return [params, lr]
