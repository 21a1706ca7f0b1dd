__all__ = ['ttypes', 'constants', 'CheckpointService', 'LineageService', 'ControlService', 'PoolService']
