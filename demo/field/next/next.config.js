// A directory of its own with all it needs, as containers get it.
module.exports = { output: 'standalone', poweredByHeader: false, outputFileTracingRoot: __dirname };
