"""The parts that `rollbook.experience_maker` is put together from; each works alone.

- `config`: `MakerConfig`, the options by name and type.
- `whole`: the batches of a rollout seen as one.
- `collecting`: an engine's samples as LightRFT's `Samples`, and as the batch that scoring fills in.
- `passes`: what actor, reference, teacher and critic say of every token.
- `scoring`: the rewards, from whichever source there is.
- `estimating`: rewards of rows -> rewards of tokens -> advantages, over the whole rollout.
- `recording`: the samples as records, with what was found out about them.
"""
