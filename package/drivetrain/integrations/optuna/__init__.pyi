from drivetrain.integrations.optuna.result import RestoredTrial as RestoredTrial
from drivetrain.integrations.optuna.result import SearchResult as SearchResult
from drivetrain.integrations.optuna.result import TrialResult as TrialResult
from drivetrain.integrations.optuna.searching import search as search
