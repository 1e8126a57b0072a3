"""A stand-in for the package Ray whose actors run in this process, one call at a time, in an order that a test chooses.

Only what `algos.extras.ray_workers` uses. Values are copied where Ray would copy them. A test that needs it puts it in
the place of the package: ``monkeypatch.setitem(sys.modules, "ray", OneProcessRay())``.
"""

import copy
import types


class Value:
    """Reference of a value: of `put`, or of a call that has run."""

    def __init__(self, value=None):
        self.value = value


class Call(Value):
    """Reference of a call to an actor, which runs when somebody waits for it or needs its value."""

    def __init__(self, actor, method, arguments):
        super().__init__()
        self.actor, self.method, self.arguments = actor, method, arguments
        self.done = False

    def run(self):
        if self.done:
            return
        values = []
        for argument in self.arguments:
            if isinstance(argument, Call):
                argument.run()
            values.append(copy.deepcopy(argument.value if isinstance(argument, Value) else argument))
        self.value = copy.deepcopy(getattr(self.actor, self.method)(*values))
        self.done = True


class Actor:
    """An object, each of whose methods has ``remote``."""

    def __init__(self, inner, number):
        self.inner, self.number = inner, number

    def __getattr__(self, method):
        return types.SimpleNamespace(remote=lambda *arguments: Call(self.inner, method, arguments))


class OneProcessRay(types.ModuleType):
    """Ray, by the names that are used.

    Args:
        first: chooses which of the actors that play, by number, finishes next.
        lost: result, counted from 0, that nobody gets, as if the actor's process had ended; None for none.
    """

    class exceptions:  # noqa: N801
        class RayError(Exception):
            pass

        class RayTaskError(RayError):
            pass

    def __init__(self, first=min, lost=None):
        super().__init__("ray")
        self.first = first
        self.lost = lost
        self.results = 0
        self.actors = []

    def is_initialized(self):
        return True

    def put(self, value):
        return Value(copy.deepcopy(value))

    def remote(self, **resources):
        def decorate(kind):
            def make():
                actor = Actor(kind(), len(self.actors))
                self.actors.append(actor)
                return actor

            return types.SimpleNamespace(remote=make)

        return decorate

    def wait(self, references, num_returns):
        numbers = {self.number_of(reference): reference for reference in references}
        chosen = numbers[self.first(numbers)]
        chosen.run()
        return [chosen], [reference for reference in references if reference is not chosen]

    def number_of(self, reference):
        return next(actor.number for actor in self.actors if actor.inner is reference.actor)

    def get(self, reference):
        reference.run()
        self.results += 1
        if self.results - 1 == self.lost:
            raise self.exceptions.RayError("its process was killed")
        return reference.value

    def kill(self, actor):
        pass
