"""Graphs of the cycle. A CPU records none: its decode forwards run eagerly, told that they stand for a graph."""

from dataclasses import replace

from quickseek.model.context import ForwardContext, GraphMode


class EagerGraphs:
    """The graph runner of a CPU, so that the specialized decode is taken there too."""

    def record(self, context: ForwardContext) -> ForwardContext:
        """The context of a step as its graph would see it: FULL and recorded if the step is pure decode."""
        if context.num_prefills:
            return context
        return replace(context, graph_mode=GraphMode.FULL, capturing=True)
