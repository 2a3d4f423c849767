"""Programs without linear attention: what backend="kda" must leave exactly as Inductor has it."""
