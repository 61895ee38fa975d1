//! What rules can say and what comes of it: rule files run by the engine against made-up requests, and their verdicts.
//!
//! Not here: budgets, reloading and broken files (`nagaya_rules`' own tests), what is done with a verdict (`edge`).

mod apache;
mod cgroup;
mod compatibility;
mod figures;
mod nginx;
mod page;
mod words;
mod world;
