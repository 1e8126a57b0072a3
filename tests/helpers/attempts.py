"""An environment of `verifiers` whose agent has several attempts: at once, or until one is scored without an error."""

import asyncio
from contextlib import suppress

import verifiers.v1 as vf


class Config(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()
    at_once: bool = False


class Attempts(vf.Env[Config]):
    async def run(self, task, agents):
        if self.config.at_once:
            await asyncio.gather(*(agents.agent.run(task) for _ in range(2)), return_exceptions=True)
            return
        for _ in range(2):
            with suppress(Exception):
                await agents.agent.run(task)
                return


__all__ = ["Attempts", "Config"]
