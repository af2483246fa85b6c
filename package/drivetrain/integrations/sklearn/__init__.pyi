from drivetrain.integrations.sklearn.estimators import TaskClassifier as TaskClassifier
from drivetrain.integrations.sklearn.estimators import TaskRegressor as TaskRegressor
