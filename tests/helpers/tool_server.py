"""An OpenEnv server of an environment whose actions call tools, as in its quick start: ``tool_server.py PORT``."""

import sys

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import Observation, State, create_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation

TOOLS = FastMCP("echo")


@TOOLS.tool
def echo_message(message: str) -> str:
    """Return the message."""
    return message


class EchoEnvironment(MCPEnvironment):
    """Its one tool returns what it gets."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__(TOOLS)

    def _paid(self, observation):
        """A call with the word "film" pays 1, and ends the episode."""
        if getattr(observation, "result", None) and "film" in str(observation.result):
            observation.reward, observation.done = 1.0, True
        return observation

    def step(self, action, timeout_s=None, **kwargs):
        return self._paid(super().step(action, timeout_s=timeout_s, **kwargs))

    async def step_async(self, action, timeout_s=None, **kwargs):
        return self._paid(await super().step_async(action, timeout_s=timeout_s, **kwargs))

    def reset(self, seed=None, episode_id=None, **kwargs):
        return Observation(metadata={"message": "ready"})

    def _step_impl(self, action, timeout_s=None, **kwargs):
        raise ValueError("only tools can be called here")

    @property
    def state(self):
        return State(step_count=0)


if __name__ == "__main__":
    app = create_app(EchoEnvironment, CallToolAction, CallToolObservation)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
