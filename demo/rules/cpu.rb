# Asked about every request before it runs. Edit and save this file: the next request obeys it, nothing is reloaded.
# What can be said here: docs/rules.md.

if request.host == "cpu.localhost"
  limit cpu: "25%"                             # of one core, for each request
  cell "cpu", cpu: "50%", cpu_shares: 64       # of one core, for all of them together; others go first
end
