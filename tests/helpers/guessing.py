"""An environment of `verifiers` by its documented interface, in which a game plays the user, as in its `textarena`."""

import itertools

import verifiers.v1 as vf


class GuessData(vf.TaskData):
    secret: int


class GuessTask(vf.Task[GuessData]):
    @vf.reward(weight=0.1)
    async def brief(self, trace):
        return 5.0 - trace.num_turns


class EnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class GuessEnv(vf.Env[EnvConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated and (guess := int(segment.last_reply)) != task.data.secret:
                segment = await interaction.turn("higher" if guess < task.data.secret else "lower")
        interaction.trace.record_reward("won", 0.0 if segment.terminated else 1.0)

    async def finalize(self, task, episode):
        (trace,) = episode.traces
        assert trace.messages[0].content == "guess a number"
        trace.record_reward("finished", 0.01)


class GuessTaskset(vf.Taskset[GuessTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        for number in itertools.count():
            yield GuessTask(GuessData(prompt="guess a number", secret=5, name=str(number)), self.config.task)


__all__ = ["GuessEnv", "GuessTaskset"]
