"""Recipes that come with the package: a task, a tiny model and a configuration each, for `rollbook train NAME`."""
