"""A taskset of the package verifiers: continue the beginning of a review, a word of praise pays."""

import verifiers.v1 as vf

WORDS = ("brilliant", "charming", "fresh", "joy", "recommend", "triumph", "warm", "witty")


class Praise(vf.Task[vf.TaskData]):
    """A beginning."""

    @vf.reward
    async def praise(self, trace):
        """1 for a word of praise."""
        return float(any(word in trace.last_reply for word in WORDS))


class PraiseTaskset(vf.Taskset[Praise, vf.TasksetConfig]):
    """40 beginnings."""

    def load(self):
        """Make the tasks."""
        for adjective in ("new", "old", "first", "last", "best"):
            for thing in ("film", "movie", "comedy", "drama", "story", "plot", "cast", "music"):
                yield Praise(vf.TaskData(prompt=f"the {adjective} {thing} is"), self.config.task)


__all__ = ["PraiseTaskset"]
