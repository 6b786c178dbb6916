"""Tasksets of the verifiers package: counting with a tool whose state is the rollout's, and a question without tools.

Its tool server is this module, run by the package with the same Python.
"""

from __future__ import annotations

import verifiers.v1 as vf


class CounterState(vf.State):
    value: int = 0


class CounterTools(vf.Toolset[vf.SharedToolsetConfig, CounterState]):
    TOOL_PREFIX = None

    @vf.tool
    async def add(self, by: int) -> str:
        """Add to the counter."""
        self.state.value += by
        return str(self.state.value)


class CountData(vf.TaskData):
    goal: int


class CountTask(vf.Task[CountData, CounterState]):
    @vf.reward(weight=0.8)
    async def reached(self, trace: vf.Trace) -> float:
        return float(trace.state.value == self.data.goal)

    @vf.reward(weight=0.2)
    async def told(self, trace: vf.Trace) -> float:
        return float(str(self.data.goal) in trace.last_reply)


class CountConfig(vf.TasksetConfig):
    has_tools: bool = True


class CountTaskset(vf.Taskset[CountTask, CountConfig]):
    @classmethod
    def toolsets(cls, config: CountConfig) -> list[vf.Toolset]:
        return [CounterTools(vf.SharedToolsetConfig())] if config.has_tools else []

    def load(self):
        for goal in range(1, 41):
            yield CountTask(CountData(prompt=f"Count to {goal}.", goal=goal, system_prompt="Use the tool."))


__all__ = ["CountTaskset"]

if __name__ == "__main__":
    CounterTools.run()
