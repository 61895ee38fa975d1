require_relative 'app'
run Notes
