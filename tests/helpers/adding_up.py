"""A taskset of `verifiers` by its documented interface, and a harness that asks the model once, in this process."""

import asyncio

import openai
import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str


class Config(vf.TasksetConfig):
    most: int = 10
    trouble: str = ""


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=2.0)
    async def right(self, trace):
        await asyncio.sleep(60.0 if trace.last_reply == "slow" else 0.001)
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.25)
    async def short(self, trace):
        if trace.last_reply == "boom":
            raise OSError("the judge is gone")
        return float(len(trace.last_reply) < 4)


class FileTask(SumTask):
    @vf.reward
    async def file(self, trace, runtime):
        return 1.0


class SumTaskset(vf.Taskset[SumTask, Config]):
    def load(self):
        for a in range(self.config.most):
            for b in range(4):
                has_trouble = self.config.trouble == "file" or (self.config.trouble == "last file" and a == 9)
                kind = FileTask if has_trouble else SumTask
                data = SumData(prompt=f"{a}+{b}=", system_prompt="Add.", answer=str(a + b))
                yield kind(data, self.config.task)


class Talk(vf.Harness[vf.HarnessConfig]):
    NEEDS_CONTAINER = EXECUTES_CODE = False
    APPENDS_SYSTEM_PROMPT = True

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}, {"role": "user", "content": prompt}]
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            await client.chat.completions.create(model=ctx.model, messages=messages)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["SumTaskset", "Talk"]
