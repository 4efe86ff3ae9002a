"""The papers' figures and tables, made with ``python -m papers``.

The scripts use the public interface, `knnper` and `knnper.strategies`, where it
suffices. Beyond it they import parts of the package that change with them, in the same
commit and under the same checks:

- figures of one method, store or round (`memory`, `drift`, `protonn`, `quality`,
  `collapse`, `rounds`): the store, the choice of λ, the round loop and checkpoints,
  because they measure steps that a run does not show;
- files of experiments, sweeps and comparisons (`catalogue`, `reproduce`, `gains`,
  `hours`, `sizes`): their readers and their runner, as the commands do;
- tables, charts and the report: `knnper.simulation.reports`, so that they look like
  those of ``knnper report``;
- data sets from archives (`data`, `leaderboard`): the cache and the readers of formats.
"""
