from .coefficients import AdaptiveCoefficient as AdaptiveCoefficient, ScheduledCoefficient as ScheduledCoefficient
from .estimators import k1 as k1, k2 as k2, k3 as k3
from .penalty import KLPenalty as KLPenalty
