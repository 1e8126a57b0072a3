"""The taskset `praise_taskset` with a harness: a program that asks for a sentence, and once more for a better one."""

import openai
import verifiers.v1 as vf
from praise_taskset import PraiseTaskset


class AskTwice(vf.Harness[vf.HarnessConfig]):
    """Asks twice; verifiers scores the last answer."""

    NEEDS_CONTAINER = EXECUTES_CODE = False
    APPENDS_SYSTEM_PROMPT = True

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        """Play one episode."""
        _, prompt = self.resolve_prompt(data)
        chat = [{"role": "user", "content": prompt}]
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            for _ in range(2):
                answer = await client.chat.completions.create(model=ctx.model, messages=chat)
                text = answer.choices[0].message.content
                chat += [{"role": "assistant", "content": text}, {"role": "user", "content": prompt}]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["PraiseTaskset", "AskTwice"]
